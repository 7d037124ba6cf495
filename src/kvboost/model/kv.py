"""A request's keys and values: preallocated, written in place, never concatenated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvboost.model.native.build import load_library
from kvboost.model.native.moved_rows import attention_mass

MOST_DIM = 256  # of a head, for kernels of ours
_ROUND = 256  # capacities are multiples of this, so that a buffer fits many requests


@dataclass(frozen=True)
class KVShape:
    """What one token's KV looks like in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Room for ``num_tokens``, of numbers: what a mask hides may be anything but not NaN."""
        size = (2, self.num_layers, self.num_kv_heads, num_tokens, self.head_dim)
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        # The system gives zeros a page at a time, once it is touched; torch would touch it all.
        return torch.from_numpy(
            np.zeros((*size[:-1], size[-1] * self.dtype.itemsize), np.uint8)
        ).view(self.dtype)


class RecomputedRows(Protocol):
    """Rows of a segment and what they count for; :class:`kvboost.reuse.shift.Sampled`."""

    @property
    def index(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def which(self) -> torch.Tensor: ...
    @property
    def mean(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...
    @property
    def cos(self) -> torch.Tensor: ...
    @property
    def sin(self) -> torch.Tensor: ...


class SharedRows:
    """The first ``count`` rows of a buffer: written, and read by several requests from now on.
    ``keys`` and ``values`` are views per layer, ``[1, kv_heads, count, head_dim]``."""

    def __init__(self, data: torch.Tensor, count: int, shorter: SharedRows | None = None) -> None:
        self.data = data
        self.count = count
        self._shorter: dict[int, SharedRows] = {}
        if shorter is not None:
            self._shorter = {shorter.count: shorter, **shorter._shorter}
        rows = data.narrow(3, 0, count)
        self.keys, self.values = (half.unsqueeze(1).unbind(0) for half in rows.unbind(0))

    def first(self, count: int) -> SharedRows:
        """The first ``count`` of them; the same object for all who ask."""
        if count >= self.count:
            return self
        return self._shorter.setdefault(count, SharedRows(self.data, count))


class RequestKV:
    """Row ``p`` holds the token at position ``p``. ``data`` is ``[2, layers, kv_heads, capacity,
    head_dim]``, keys first, and holds the rows from ``start`` on; rows that were never written
    hold any numbers. With ``base``, its rows are read there and never written::

        base   |=====================|
        data                         |------------|      start = base.count
        data   |---------------------------------|       start = 0: base is its own beginning
    """

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self.shape = shape
        self.base: SharedRows | None = None
        self.start = 0
        self._hold(shape.allocate(-(-num_tokens // _ROUND) * _ROUND))

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        # A view per layer, made once: on a GPU every view made per step costs as much as a kernel.
        self._keys, self._values = (half.unsqueeze(1).unbind(0) for half in data.unbind(0))

    @property
    def capacity(self) -> int:
        """One past the last position there is room for."""
        return self.start + self.data.shape[3]

    @property
    def own_start(self) -> int:
        """The first position that is not read from ``base``."""
        return 0 if self.base is None else self.base.count

    def attach_prefix(self, base: SharedRows | None) -> None:
        """Begins a new request behind ``base``; what was written is void."""
        self.base = base
        self.start = self.own_start

    def share(self, count: int) -> SharedRows:
        """At most the first ``count`` rows, which must be written, for another request to stand
        on. They stay as they are from now on."""
        if self.start == 0 and (self.base is None or count > self.base.count):
            self.base = SharedRows(self.data, count, self.base)
        assert self.base is not None
        return self.base.first(count)

    def detach_prefix(self) -> None:
        """Takes the rows of ``base`` over into a buffer of its own."""
        if self.base is not None:
            whole = self.shape.allocate(self.capacity)
            whole[:, :, :, : self.base.count] = self.base.data[:, :, :, : self.base.count]
            self.base, self.start = None, 0
            self._hold(whole)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` rows; grows by doubling and keeps what is written."""
        if num_tokens <= self.capacity:
            return
        kept = self.own_start - self.start  # what others read stays where it is
        rows = max(num_tokens - self.own_start, 2 * self.data.shape[3] - kept)
        grown = self.shape.allocate(-(-rows // _ROUND) * _ROUND)
        grown[:, :, :, : self.data.shape[3] - kept] = self.data[:, :, :, kept:]
        self.start = self.own_start
        self._hold(grown)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)``: a view, unless they stand partly in ``base``."""
        if start >= self.start:
            return self.data[:, :, :, start - self.start : end - self.start]
        assert self.base is not None
        shared = self.base.data[:, :, :, start : min(end, self.start)]
        if end <= self.start:
            return shared
        return torch.cat([shared, self.data[:, :, :, : end - self.start]], dim=3)

    def copy_rows(self, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)`` as a contiguous tensor of their own in host memory, pinned when
        they come from a GPU."""
        view = self.rows(start, end)
        on_gpu = view.device.type == "cuda"
        copy = torch.empty(view.shape, dtype=view.dtype, device="cpu", pin_memory=on_gpu)
        return copy.copy_(view)

    def write(
        self, layer: int, positions: range | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes fresh rows of one layer; ``keys`` and ``values`` are ``[1, kv_heads, rows,
        head_dim]``."""
        if isinstance(positions, range):
            first = positions.start - self.start
            self._keys[layer].narrow(2, first, len(positions)).copy_(keys)
            self._values[layer].narrow(2, first, len(positions)).copy_(values)
        else:
            rows = positions - self.start if self.start else positions
            self._keys[layer].index_copy_(2, rows, keys)
            self._values[layer].index_copy_(2, rows, values)

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values in rows ``[start, end)``, ``[1, kv_heads, rows, head_dim]``:
        views, unless they stand partly in ``base``."""
        if start >= self.start:
            first, length = start - self.start, end - start
            return (
                self._keys[layer].narrow(2, first, length),
                self._values[layer].narrow(2, first, length),
            )
        assert self.base is not None
        shared = min(end, self.start) - start
        return tuple(  # type: ignore[return-value]
            torch.cat(
                [theirs[layer].narrow(2, start, shared), own[layer][:, :, : end - start - shared]],
                2,
            )
            for theirs, own in (
                (self.base.keys, self._keys),
                (self.base.values, self._values),
            )
        )

    def mass(
        self, layer: int, query: torch.Tensor, scale: float, absent: torch.Tensor
    ) -> torch.Tensor | None:
        """How much the rows of ``query``, ``[1, heads, rows, dim]``, attend to each row before
        them, ``[start]``, but for those ``absent``; None where no kernel of ours can tell."""
        if not has_kernels(self.shape):
            return None
        keys, _ = self.layer(layer, 0, len(absent) + query.shape[2])
        return attention_mass(query[0], keys[0], scale, absent)

    def errors(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: RecomputedRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What fresh ``keys`` and ``values``, ``[1, kv_heads, segment, dim]``, differ from those
        that are known in some ``rows``, added up by what each has of a mean: of keys times cos and
        times sin of their rows, and of values; float32 ``[kv_heads, means, dim]``."""
        known_keys, known_values = (part[0] for part in self.layer(layer, 0, self.capacity))
        if has_kernels(self.shape):
            heads, dim, means = known_keys.shape[0], keys.shape[3], len(rows.mean)
            keys, values = (
                part if part.stride(3) == 1 else part.contiguous() for part in (keys, values)
            )
            sums = torch.zeros(3, heads, means, dim, dtype=torch.float32, device=keys.device)
            indices = [part.contiguous() for part in (rows.index, rows.positions, rows.which)]
            factors = [part.float().contiguous() for part in (rows.weights, rows.cos, rows.sin)]
            load_library().kvboost_errors(  # type: ignore[union-attr]
                *(keys.data_ptr(), keys.stride(1), keys.stride(2)),
                *(values.data_ptr(), values.stride(1), values.stride(2)),
                *(known_keys.data_ptr(), known_values.data_ptr(), known_keys.stride(0)),
                *(heads, dim, means, len(rows.index)),
                *(part.data_ptr() for part in (*indices, *factors)),
                sums.data_ptr(),
                torch.get_num_threads(),
            )
            return sums[0], sums[1], sums[2]
        of_keys, of_values = (
            fresh[0].index_select(1, rows.index).float()
            - known.index_select(1, rows.positions).float()
            for fresh, known in ((keys, known_keys), (values, known_values))
        )
        by_cos, by_sin = (rows.mean @ (of_keys * part) for part in (rows.cos, rows.sin))
        return by_cos, by_sin, rows.mean @ of_values

    def shift(
        self,
        layer: int,
        start: int,
        which: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        turns: tuple[torch.Tensor, torch.Tensor],
        values: torch.Tensor,
    ) -> None:
        """Adds to the rows from ``start`` on, which are its own, one of several offsets each:
        ``which``, ``[rows]``, the last standing for none. Offsets are float32 ``[kv_heads, offsets,
        dim]``, those of keys along and across ``turns``, ``[rows, dim]``."""
        rows = len(which)
        own_keys, own_values = (part[0] for part in self.layer(layer, start, start + rows))
        if has_kernels(self.shape):
            heads, offsets, dim = values.shape
            offsets_of = [part.float().contiguous() for part in (*keys, values)]
            read = [*offsets_of, *(part.to(torch.bfloat16).contiguous() for part in turns)]
            load_library().kvboost_shift(  # type: ignore[union-attr]
                *(own_keys.data_ptr(), own_values.data_ptr(), own_keys.stride(0)),
                *(heads, dim, rows, which.data_ptr(), offsets),
                *(part.data_ptr() for part in read),
                torch.get_num_threads(),
            )
            return
        along, across = (part.to(own_keys.dtype).index_select(1, which) for part in keys)
        own_keys.add_(along.mul_(turns[0]).addcmul_(across, turns[1]))
        own_values.add_(values.to(own_values.dtype).index_select(1, which))


def has_kernels(shape: KVShape) -> bool:
    """Whether kernels of ours serve such rows on this machine."""
    fits = shape.dtype == torch.bfloat16 and shape.device.type == "cpu"
    fits = fits and shape.head_dim % 32 == 0 and shape.head_dim <= MOST_DIM
    return fits and not isinstance(load_library(), str)


class KVPool:
    """Hands out request KV and takes it back. Fresh memory costs a page fault every 4 KiB, five
    times the copy of a hit, so the last few buffers are kept for the next requests."""

    def __init__(self, shape: KVShape, max_idle: int = 2, max_idle_bytes: int = 1024**3) -> None:
        self.shape = shape
        self._max_idle = max_idle
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[RequestKV] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, num_tokens: int, base: SharedRows | None = None) -> Iterator[RequestKV]:
        """A buffer for at least ``num_tokens`` rows, those of ``base`` among them, until the
        context is left."""
        kv = self._take(num_tokens - (base.count if base else 0))
        kv.attach_prefix(base)
        del base  # it goes when the last who stands on it does
        try:
            yield kv
        finally:
            self._give(kv)

    def bytes_for(self, num_tokens: int) -> int:
        """What ``lend`` would take for so many rows of their own, now."""
        with self._lock:
            idle = self._fitting(num_tokens)
        rows = idle.capacity if idle is not None else -(-num_tokens // _ROUND) * _ROUND
        return rows * self.shape.row_bytes

    def _take(self, num_tokens: int) -> RequestKV:
        with self._lock:
            idle = self._fitting(num_tokens)
            if idle is not None:
                self._idle.remove(idle)
                return idle
        return RequestKV(self.shape, num_tokens)

    def _fitting(self, num_tokens: int) -> RequestKV | None:
        fitting = (kv for kv in self._idle if kv.capacity >= num_tokens)
        return min(fitting, key=lambda kv: kv.capacity, default=None)

    def _give(self, kv: RequestKV) -> None:
        if kv.base is not None and kv.base.data is kv.data:
            return  # others may stand on it: it goes when the last of them does
        kv.attach_prefix(None)
        # Never waits: the garbage collector may run this in a thread that holds the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(kv)
            while len(self._idle) > self._max_idle or self._idle_bytes() > self._max_idle_bytes:
                self._idle.pop(0)
        finally:
            self._lock.release()

    def _idle_bytes(self) -> int:
        return sum(kv.data.nbytes for kv in self._idle)

    def clear(self) -> None:
        """Lets go of the buffers that nobody uses."""
        with self._lock:
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return self._idle_bytes()
