"""Batches whose rows are in pages, and packed segments as one. One kernel of ours attends for all,
except for long runs of consecutive rows, which kernels of torch's attend for faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import torch

from kvboost.model.execution.attention import Batch, attend_segment
from kvboost.model.execution.partial_attention import count_sinks
from kvboost.model.execution.segment import Rules, Segment, rows_first
from kvboost.model.paged.long_rows import LongKernel, long_kernels
from kvboost.model.paged.slab import PAGE, Slab
from kvboost.model.triton.attention import attend
from kvboost.model.triton.dense import gather, merge
from kvboost.model.triton.host import to_device
from kvboost.model.triton.rows import Tile, TiledRows
from kvboost.model.triton.write import write

Fresh = tuple[torch.Tensor, torch.Tensor]
"""The keys and values of a batch's rows, ``[rows, kv_heads, dim]`` each."""

LEAST_DENSE_ROWS = 256
"""Where none of torch's long kernels serves: from so many consecutive rows on, gathering the keys
and calling torch's causal attention is faster than reading the pages in place."""
FEW_SEGMENTS, LEAST_OF_MANY = 4, 1024
"""A long kernel runs once for each segment. In a batch of more segments than this, only those with
so many rows get one."""


class RowBatch(Batch):
    """Rows of one or more requests, all in pages of one slab."""

    slots: torch.Tensor
    """int64 ``[rows]``: where the rows are written in every layer."""
    is_fused = True
    adapters: torch.Tensor | None = None
    """int64 ``[rows]``: the slots of the rows' adapters in a decode step, negative for rows without
    one; None if no row has one."""

    def __init__(self, slab: Slab, segments: Sequence[Segment] = ()) -> None:
        super().__init__(segments)
        self._slab = slab

    def pages(self, layer: int) -> torch.Tensor:
        """A layer's pages, ``[pages, kv_heads, page, 2 * dim]``."""
        return self._slab.layers[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        write(rows_first(keys), rows_first(values), self.pages(layer), self.slots)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        fresh = rows_first(key), rows_first(value)
        return self.attend_rows(layer, rows_first(query), rules, fresh=fresh)[None]

    def attend_rows(
        self, layer: int, query: torch.Tensor, rules: Rules, *, fresh: Fresh | None = None
    ) -> torch.Tensor:
        """Attention of ``query``, ``[rows, heads, dim]``; returns the same shape. ``fresh`` are
        the keys and values of these rows, which have been written."""
        raise NotImplementedError


Kind = tuple[int | None, float | None, int, bool]
"""The window, the soft cap and the heads of a layer, and whether it has sinks."""


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a batch that belong to one segment."""

    segment: int
    start: int
    """Its first row among those of the batch."""
    first: int
    """Its first row among those of the segment."""
    count: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count)


@dataclass(frozen=True)
class Work:
    """Which kernel attends for which rows of a batch."""

    long: list[tuple[Run, LongKernel]]
    dense: list[Run]
    """Whole segments that torch computes as it would without pages: plain ones, and those with
    images whose rows see ahead."""
    others: list[Run]


class PagedBatch(RowBatch):
    """Segments that go through the model packed into one row; all in pages of one slab."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        slab = segments[0].kv.slab
        assert slab is not None
        super().__init__(slab, segments)
        self._kvs = [segment.kv for segment in segments]
        self._starts = list(accumulate(map(len, segments), initial=0))
        self._positions = [
            segment.position_ids(torch.device("cpu")).cpu() for segment in self.segments
        ]
        self.slots = self._find_slots()
        has_images = any(segment.images is not None for segment in segments)
        self.is_fused = not self.has_hooks and not self._as_stock and not has_images
        self._work: dict[Kind, Work] = {}
        self._rows: dict[Kind, TiledRows] = {}

    def _of(self, segments: Sequence[Segment]) -> Batch:
        return PagedBatch(segments)

    @cached_property
    def _as_stock(self) -> bool:
        """Whether to make stock transformers' calls: for a segment that asks for it, is alone and
        begins at position 0."""
        first = self.segments[0]
        alone = len(self.segments) == 1
        return alone and first.as_stock and first.is_plain and first.first == 0

    def _find_slots(self) -> torch.Tensor:
        for kv, segment in zip(self._kvs, self.segments, strict=True):
            if segment.first < kv.own_start or segment.end > kv.capacity:
                raise RuntimeError(
                    f"rows [{segment.first}, {segment.end}) are not this request's own: it has "
                    f"[{kv.own_start}, {kv.capacity})"
                )
        counts = torch.tensor([len(segment) for segment in self.segments])
        requests = torch.tensor([kv.holding.row for kv in self._kvs])
        sent = torch.stack([torch.cat(self._positions), requests.repeat_interleave(counts)])
        position, request = to_device(sent, torch.int64, self._slab.shape.device)
        return self._slab.table[request, position // PAGE].long() * PAGE + position % PAGE

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.show_fresh(layer, keys, values)
        super().write(layer, keys, values)

    def attend_rows(
        self, layer: int, query: torch.Tensor, rules: Rules, *, fresh: Fresh | None = None
    ) -> torch.Tensor:
        assert fresh is not None
        scale, window, softcap, sinks, _ = rules
        kind = window, softcap, query.shape[1], sinks is not None
        if kind not in self._work:
            self._work[kind] = self._plan(*kind)
        work = self._work[kind]
        if work.long and work.long[0][0].count == len(query) and not self._first(work.long[0][0]):
            return _by_kernel(work.long[0][1], query, fresh, scale, sinks, causal=True)[0]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for run, kernel in work.long:
            own = query[run.rows], (fresh[0][run.rows], fresh[1][run.rows])
            table = self._slab.table[self._kvs[run.segment].holding.row]
            before, pages = self._first(run), self.pages(layer)
            attend_after(kernel, *own, pages, table, before, scale, out[run.rows], sinks)
        for run in work.dense:
            q, k, v = (part[run.rows].transpose(0, 1)[None] for part in (query, *fresh))
            segment = self.segments[run.segment]
            read = partial(segment.kv.layer, layer)
            found = attend_segment(segment, q, k, v, read, segment.narrow(rules))
            out[run.rows] = found[0].transpose(0, 1)
        if work.others:
            if not any(self.segments[run.segment].hides(window) for run in work.others):
                rules = rules._replace(window=None)
            if kind not in self._rows:
                self._rows[kind] = self._rows_of(work.others, query.shape[1])
            attend(
                query,
                self.pages(layer),
                self._rows[kind],
                *rules,
                absent=self._absent([run.segment for run in work.others]),
                out=out,
            )
        return out

    def _first(self, run: Run) -> int:
        """The position of its first row."""
        return self.segments[run.segment].first + run.first

    def _plan(
        self, window: int | None, softcap: float | None, heads: int, has_sinks: bool = False
    ) -> Work:
        shape = self._slab.shape
        kernels: Sequence[LongKernel] = ()
        are_latents = shape.sides == 1  # too wide for kernels of torch's
        if softcap is None and not self._as_stock and not are_latents:
            sizes = heads, shape.num_kv_heads, shape.head_dim
            kernels = long_kernels(shape.device, shape.dtype, *sizes)
        least = 0 if len(self.segments) <= FEW_SEGMENTS else LEAST_OF_MANY
        work = Work([], [], [])
        for index, segment in enumerate(self.segments):
            sees_all = softcap is None and segment.is_plain and not segment.hides(window)
            whole = Run(index, self._starts[index], 0, len(segment))
            is_dense = sees_all and not kernels and not has_sinks and _is_dense(segment)
            is_dense = is_dense and not are_latents
            if is_dense or segment.whole_images:  # our kernel is causal
                work.dense.append(whole)
                continue
            cuts = ((each.cut(segment.first, segment.end), each) for each in kernels if sees_all)
            found = ((rows, each) for rows, each in cuts if rows and len(rows) >= least)
            rows, kernel = next(found, (None, None))
            if rows is None or kernel is None:
                work.others.append(whole)
                continue
            before, after = rows.start - segment.first, segment.end - rows.stop
            long = Run(index, whole.start + before, before, len(rows))
            work.long.append((long, kernel))
            ends = (
                Run(index, whole.start, 0, before),
                Run(index, long.rows.stop, before + len(rows), after),
            )
            work.others.extend(run for run in ends if run.count)
        return work

    def _rows_of(self, runs: Sequence[Run], heads: int) -> TiledRows:
        """The rows of these runs, for our kernel."""
        shape = self._slab.shape
        requests = to_device(
            [self._kvs[run.segment].holding.row for run in runs], torch.int64, shape.device
        )
        group = heads // shape.num_kv_heads
        most = max(run.count for run in runs)
        return TiledRows.of(
            [self._positions[run.segment][run.first : run.first + run.count] for run in runs],
            self._slab.table[requests],
            page=PAGE,
            heads=heads,
            kv_heads=shape.num_kv_heads,
            dtype=shape.dtype,
            tile=Tile.over(self.pages(0), group * most),
            starts=[run.start for run in runs],
        )

    def _absent(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Which rows of each of these segments no query may attend to."""
        segments = [self.segments[index] for index in indices]
        if all(segment.absent is None for segment in segments):
            return None
        end = max(segment.end for segment in segments)
        device = self._slab.shape.device
        absent = torch.zeros(len(segments), end, dtype=torch.bool, device=device)
        for row, segment in zip(absent, segments, strict=True):
            if segment.absent is not None:
                row[: len(segment.absent)] = segment.absent
        return absent


def attend_after(
    kernel: LongKernel,
    query: torch.Tensor,
    fresh: Fresh,
    pages: torch.Tensor,
    table: torch.Tensor,
    before: int,
    scale: float,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of consecutive rows, ``[rows, heads, dim]``, over the ``before`` rows of the
    request that ``table`` names in ``pages`` and over their own keys and values."""
    if not before:
        out.copy_(_by_kernel(kernel, query, fresh, scale, sinks, causal=True)[0])
        return
    own = _by_kernel(kernel, query, fresh, scale, causal=True)
    keys, values = (part.transpose(0, 1) for part in gather(pages, table, before))
    merge(_by_kernel(kernel, query, (keys, values), scale, causal=False), own, out, sinks)


def _by_kernel(
    kernel: LongKernel,
    query: torch.Tensor,
    keys_values: Fresh,
    scale: float,
    sinks: torch.Tensor | None = None,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``[rows, heads, dim]`` over ``[keys, kv_heads, dim]``; and its log-sum-exps,
    ``[heads, rows]``, which do not count ``sinks``."""
    query, keys, values = (part.transpose(0, 1)[None] for part in (query, *keys_values))
    out, sums = kernel.attend(query, keys, values, scale, causal)
    return count_sinks((out, sums), sinks)[0].transpose(0, 1), sums[0]


def _is_dense(segment: Segment) -> bool:
    """Whether torch's causal attention serves this segment better: it is a whole sequence, which is
    then computed as stock transformers computes it, or has many consecutive rows."""
    return segment.is_plain and (segment.first == 0 or len(segment) >= LEAST_DENSE_ROWS)
