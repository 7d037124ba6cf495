"""Attention of many requests in one call: what ``attention.c`` reads, and the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvboost.model import native
from kvboost.model.execution.kv import RequestKV, SharedRows
from kvboost.model.execution.kv_shape import AnyShape, KVShape
from kvboost.model.execution.segment import Segment
from kvboost.model.native.layers import BLOCK, scratch

Ints = npt.NDArray[np.int32]

CUT_KEYS = 512
"""A row that is alone attends to this many keys in one task, so that several threads share it."""
MOST_DIM = 256
"""The largest head dimension that the kernels serve."""

RUN = np.dtype(
    [(name, np.int64) for name in ("keys", "values", "layer_stride", "head_stride")]
    + [(name, np.int32) for name in ("first", "num_rows")]
)
PLACE = np.dtype([(name, np.int64) for name in ("key", "value", "layer_stride", "head_stride")])


class _Plan(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kv_heads", "dim", "num_runs", "num_rows", "num_merged")),
        *((name, c_void_p) for name in ("runs", "places", "rows", "limits", "slots", "merged")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("plan", c_void_p),
        ("layer", c_int32),
        ("heads", c_int32),
        ("scale", c_float),
        ("queries", c_void_p),
        ("head_stride", c_int64),
        ("row_stride", c_int64),
        ("out", c_void_p),
        ("parts", c_void_p),
        ("sinks", c_void_p),
        ("workspaces", c_void_p),
    ]


def serves(shape: AnyShape) -> bool:
    """Whether our kernels serve KV of this shape on this machine."""
    if len(shape.groups) > 1 or shape.groups[0].sides == 1:
        return False
    head_dim = shape.groups[0].head_dim
    fits = head_dim % BLOCK == 0 and head_dim <= MOST_DIM
    return fits and native.is_available(shape.dtype, shape.device)


class Kernels:
    """The compiled calls for one dtype. They run in torch's threads and release Python's lock."""

    def __init__(self, dtype: torch.dtype) -> None:
        library = native.library(dtype)
        self._attend = library.kvboost_attend
        self._write = library.kvboost_write
        self._workspace_bytes = int(library.kvboost_workspace_bytes())
        self._dtype = dtype
        self._kept: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, num: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory for ``num`` numbers, kept for later calls: fresh memory costs page faults. One
        call at a time uses it."""
        if name not in self._kept or len(self._kept[name]) < num:
            self._kept[name] = scratch(num, dtype or self._dtype)
        return self._kept[name]

    def workspaces(self) -> int:
        """The address of the memory in which threads attend."""
        num_bytes = torch.get_num_threads() * self._workspace_bytes
        return self.scratch("workspaces", num_bytes, torch.uint8).data_ptr()

    @classmethod
    def for_shape(cls, shape: AnyShape) -> Kernels | None:
        """The kernels for a model's KV; None where torch serves it."""
        return cls(shape.dtype) if serves(shape) else None

    def write(self, plan: Plan, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the fresh rows of all segments, ``[1, kv_heads, rows, dim]``, into their KV."""
        keys, values = _by_strides(keys), _by_strides(values)
        self._write(
            plan.address,
            layer,
            *(keys.data_ptr(), keys.stride(1), keys.stride(2)),
            *(values.data_ptr(), values.stride(1), values.stride(2)),
            torch.get_num_threads(),
        )

    def attend(
        self,
        plan: Plan,
        layer: int,
        query: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``[1, heads, rows, dim]``; returns ``[1, rows, heads, dim]``. ``sinks``,
        ``[heads]``: one more score of each head, whose value is zero."""
        _, heads, rows, dim = query.shape
        out = query.new_empty(1, rows, heads, dim)
        parts = self.scratch("parts", plan.num_slots * heads * (dim + 1), torch.float32)
        self._call(plan.address, layer, query, scale, out.data_ptr(), parts, sinks)
        return out

    def attend_parts(
        self, plan: PartPlan, layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of ``[1, heads, rows, dim]`` to each piece of the plan: float32 ``[pieces,
        rows, heads, dim + 1]``, of which the last number is the log2-sum-exp2 of the weights. Valid
        until the next call."""
        _, heads, rows, dim = query.shape
        size = plan.num_pieces * rows * heads * (dim + 1)
        parts = self.scratch("parts", size, torch.float32)
        self._call(plan.address, layer, query, scale, None, parts)
        return parts[:size].view(plan.num_pieces, rows, heads, dim + 1)

    def _call(
        self,
        plan: int,
        layer: int,
        query: torch.Tensor,
        scale: float,
        out: int | None,
        parts: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        query, sinks = _by_strides(query), None if sinks is None else sinks.float()
        call = _Call(
            *(plan, layer, query.shape[1], scale),
            *(query.data_ptr(), query.stride(1), query.stride(2)),
            *(out, parts.data_ptr(), address_of(sinks), self.workspaces()),
        )
        self._attend(ctypes.addressof(call), torch.get_num_threads())


class PartPlan:
    """The first ``count`` rows of ``data``, ``[2, layers, kv_heads, capacity, dim]``, in pieces of
    ``size``; ``num_rows`` queries attend to all of them. Holds the arrays that the kernels read."""

    def __init__(
        self, data: torch.Tensor, count: int, size: int, num_rows: int, shape: KVShape
    ) -> None:
        starts = np.arange(0, count, size)
        self.num_pieces = len(starts)
        self._data = data
        runs = np.zeros(len(starts), RUN)
        row_bytes = data.stride(3) * data.itemsize
        runs["keys"] = data.data_ptr() + starts * row_bytes
        runs["values"] = runs["keys"] + data.stride(0) * data.itemsize
        runs["layer_stride"], runs["head_stride"] = data.stride(1), data.stride(2)
        runs["first"], runs["num_rows"] = np.arange(len(starts)) * num_rows, num_rows
        rows = np.tile(np.arange(num_rows, dtype=np.int32), len(starts))
        limits = np.minimum(count - starts, size).astype(np.int32).repeat(num_rows)
        slots = np.arange(len(rows), dtype=np.int32)
        self._arrays = (runs, rows, limits, slots)
        self._plan = _Plan(
            *(shape.num_kv_heads, shape.head_dim, len(runs), num_rows, 0),
            *(runs.ctypes.data, None),
            *(array.ctypes.data for array in (rows, limits, slots)),
            None,
        )
        self.address = ctypes.addressof(self._plan)


class Plan:
    """Which packed rows attend to which runs of keys, and where fresh rows are written: the same in
    all layers. Holds the arrays that the kernels read."""

    def __init__(self, segments: Sequence[Segment], shape: KVShape) -> None:
        self._segments = segments
        self._runs: list[tuple[torch.Tensor, int, Ints, Ints]] = []
        positions = [_positions(segment) for segment in segments]
        for segment in segments:  # C would write out of bounds
            if segment.first < segment.kv.own_start or segment.end > segment.kv.capacity:
                raise RuntimeError(
                    f"rows [{segment.first}, {segment.end}) are not this request's own: it has "
                    f"[{segment.kv.own_start}, {segment.kv.capacity})"
                )
        starts = np.cumsum([0, *map(len, positions)]).astype(np.int32)
        places = [_places(segment.kv, at) for segment, at in zip(segments, positions, strict=True)]
        rows = [np.arange(a, b, dtype=np.int32) for a, b in pairwise(starts)]
        self._add_runs(rows, positions)
        runs = np.zeros(len(self._runs), RUN)
        first = 0
        for at, (data, start, seen_by, _) in enumerate(self._runs):
            offset = start * shape.head_dim * data.itemsize
            keys = data.data_ptr() + offset
            values = keys + data.stride(0) * data.itemsize
            runs[at] = (keys, values, data.stride(1), data.stride(2), first, len(seen_by))
            first += len(seen_by)
        seeing = np.concatenate([seen_by for _, _, seen_by, _ in self._runs])
        limits = np.concatenate([limits for _, _, _, limits in self._runs])
        slots, merged = _slots(seeing, int(starts[-1]))
        self.num_slots = int(slots.max()) + 1 if len(merged) else 0
        self._arrays = (runs, np.concatenate(places), seeing, limits, slots, merged)
        self._plan = _Plan(
            *(shape.num_kv_heads, shape.head_dim, len(runs), int(starts[-1]), len(merged)),
            *(array.ctypes.data for array in self._arrays),
        )
        self.address = ctypes.addressof(self._plan)

    def _add_runs(self, rows: Sequence[Ints], positions: Sequence[Ints]) -> None:
        """Lists the runs: one for each set of shared rows, then those of each segment alone."""
        alone = len(self._segments) == 1 and len(rows[0]) == 1
        on_base: dict[int, tuple[SharedRows, list[int]]] = {}
        for index, segment in enumerate(self._segments):
            if segment.kv.base is not None:
                on_base.setdefault(id(segment.kv.base), (segment.kv.base, []))[1].append(index)
        based: set[int] = set()
        for base, members in on_base.values():
            if len(members) > 1 or self._segments[members[0]].kv.start:
                together = np.concatenate([rows[index] for index in members])
                cut = CUT_KEYS if alone else base.count
                for start in range(0, base.count, cut):
                    seen = min(cut, base.count - start)
                    limits = np.full(len(together), seen, np.int32)
                    self._runs.append((base.data, start, together, limits))
                based.update(members)
        for index, segment in enumerate(self._segments):
            kv = segment.kv
            first = kv.own_start if index in based else 0
            for start, end in _present(segment, first, CUT_KEYS if alone else None):
                seeing = positions[index] >= start
                limits = np.minimum(positions[index][seeing] + 1, end) - start
                self._runs.append((kv.data, start - kv.start, rows[index][seeing], limits))


def _present(segment: Segment, first: int, cut: int | None) -> Iterator[tuple[int, int]]:
    """The intervals of positions from ``first`` on that a segment's rows may attend to."""
    if segment.absent is not None:
        there = np.flatnonzero(~segment.absent[first : segment.end].numpy()) + first
        for some in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1):
            if len(some):
                yield int(some[0]), int(some[-1]) + 1
    elif cut is None:
        yield first, segment.end
    else:
        for start in range(first, segment.end, cut):
            yield start, min(start + cut, segment.end)


def _positions(segment: Segment) -> Ints:
    if isinstance(segment.positions, range):
        return np.arange(segment.positions.start, segment.positions.stop, dtype=np.int32)
    return segment.positions.numpy().astype(np.int32)


def _places(kv: RequestKV, positions: Ints) -> npt.NDArray[np.void]:
    """Where fresh rows are written in layer 0 and head 0."""
    data = kv.data
    places = np.zeros(len(positions), PLACE)
    row_bytes = data.stride(3) * data.itemsize
    places["key"] = data.data_ptr() + (positions.astype(np.int64) - kv.start) * row_bytes
    places["value"] = places["key"] + data.stride(0) * data.itemsize
    places["layer_stride"], places["head_stride"] = data.stride(1), data.stride(2)
    return places


def _slots(rows: Ints, num_rows: int) -> tuple[Ints, Ints]:
    """For each entry of ``rows``, the slot of its partial result, or -1 if its row occurs once;
    and ``[rows of several parts, 3]``: the row, its first slot, how many slots."""
    counts = np.bincount(rows, minlength=num_rows)
    slots = np.full(len(rows), -1, np.int32)
    several = np.flatnonzero(counts > 1)
    if len(several):
        order = np.argsort(rows, kind="stable")
        order = order[counts[rows[order]] > 1]
        slots[order] = np.arange(len(order))
    firsts = np.cumsum(counts[several]) - counts[several]
    merged = np.stack([several, firsts, counts[several]], axis=1).astype(np.int32)
    return slots, np.ascontiguousarray(merged)


def address_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _by_strides(rows: torch.Tensor) -> torch.Tensor:
    """The kernels read by strides, but the last dimension must be contiguous."""
    return rows if rows.stride(3) == 1 else rows.contiguous()
