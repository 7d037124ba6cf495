"""Forwards of one request's rows over our own pages, as CUDA graphs.

Rows after a known beginning, rows of a repair and the last rows of a prompt that probe it run
through buffers of a few sizes. Each size is a graph; while one is missing, rows run in a larger
one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kvboost.model.execution.segment import Hook, Rules, Segment, rows_first
from kvboost.model.paged.batch import Fresh, RowBatch
from kvboost.model.paged.graphs import Capture
from kvboost.model.paged.slab import PAGE, SCRATCH, Slab, pages_for
from kvboost.model.paged.step_batch import RunModel
from kvboost.model.triton.write import write
from kvboost.reuse.paged.graphs import (
    SIZES,
    CapturedForward,
    FixedHook,
    FixedMass,
    FixedRows,
    FixedShift,
)
from kvboost.reuse.paged.hooks import (
    PROBES,
    REPAIRS,
    ROWS,
    SCORED,
    Attention,
    EnoughLayers,
)
from kvboost.reuse.paged.kernels import GpuKernels
from kvboost.reuse.repair import PROBE_ROWS

log = logging.getLogger("kvboost")

MOST_SCORED = 64
"""The most rows of a segment whose logits are asked for."""
MOST_MISSED = 8
"""A size that was missing so often is recorded while requests wait."""
MOST_ABSORBED = 1 << 28
"""Rows times heads times keys: more of consecutive rows over latents run sooner without a graph,
which could not expand the latents of all keys. Estimated, not measured."""
MOST_KEYS = 1 << 18
"""Requests with more rows of KV than this have no such forwards: buffers would take too much."""


class SlabPages:
    """The pages of a slab."""

    def __init__(self, slab: Slab) -> None:
        self.caches = slab.layers
        self.size = PAGE
        self.num_kv_heads, self.head_dim = slab.shape.num_kv_heads, slab.shape.head_dim
        self.dtype, self.device = slab.shape.dtype, slab.shape.device


class CapturedBatch(RowBatch):
    """Rows of one request at any positions. ``targets`` are their slots, filled before every
    forward; those of padding are -1.

    A hook compares fresh rows with what is in their pages. So if there is one, layers that rotate
    and write in one kernel write to a buffer, and the rows go to their pages after the hook."""

    def __init__(self, slab: Slab, size: int, hook: Hook | None, attention: Attention) -> None:
        super().__init__(slab)
        self.slots = torch.zeros(size, dtype=torch.int64, device=slab.shape.device)
        self.targets = torch.full_like(self.slots, -1)
        self._hook = hook
        self._attention = attention
        self._fresh: torch.Tensor | None = None
        if hook is not None:
            shape = slab.shape
            rows = (pages_for(size), PAGE, shape.num_kv_heads, 2 * shape.head_dim)
            self._fresh = torch.zeros(rows, dtype=shape.dtype, device=shape.device)
            torch.arange(size, out=self.slots)

    def load(self, slots: torch.Tensor) -> None:
        self.targets.copy_(slots)
        if self._fresh is None:
            self.slots.copy_(slots.clamp(min=SCRATCH * PAGE))

    def pages(self, layer: int) -> torch.Tensor:
        """Where layers that write themselves write to."""
        if self._fresh is None:
            return super().pages(layer)
        return self._fresh.transpose(1, 2)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._store(layer, rows_first(keys), rows_first(values))

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values ``[rows, kv_heads, dim]`` after the hook has seen them."""
        if self._hook is not None:
            self._hook.on_fresh(layer, keys, values)
        write(keys, values, super().pages(layer), self.targets)

    def show(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        if self._hook is not None:
            self._hook.on_query(layer, rows_first(query), rules)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        return self._attention(layer, rows_first(query), rules)[None]

    def attend_rows(
        self, layer: int, query: torch.Tensor, rules: Rules, *, fresh: Fresh | None = None
    ) -> torch.Tensor:
        """Called by layers that have written the fresh rows to ``pages``."""
        if self._hook is not None and self._fresh is not None:
            keys, values = self._fresh.flatten(0, 1)[: len(self.slots)].chunk(2, -1)
            self._store(layer, keys, values)
            self._hook.on_query(layer, query, rules)
        return self._attention(layer, query, rules)  # that of padding is zero


class SegmentForwards:
    """Runs segments of requests with pages of one slab. One thread at a time may call it."""

    def __init__(
        self, kernels: GpuKernels, slab: Slab, heads: int, run_rows: RunModel, capture: Capture
    ) -> None:
        self.kernels = kernels
        self.slab = slab
        self.num_runs = 0
        self._heads = heads
        self._run_rows = run_rows
        self._capture = capture
        self._sizes = SIZES
        self._forwards: dict[tuple[str, int], CapturedForward[Any]] = {}
        self._missing: Counter[tuple[str, int]] = Counter()
        """The number of times rows would have run in a forward of this kind and size."""
        self._refused: dict[str, str] = {}

    @property
    def note(self) -> str | None:
        """Why some segments run as without buffers of fixed size."""
        return (
            "; ".join(f"{kind} run eagerly: {why}" for kind, why in self._refused.items()) or None
        )

    @property
    def most_rows(self) -> int:
        """The most rows of a segment that it runs."""
        return self._sizes[-1]

    def bucket_of(self, rows: int) -> int:
        """The number of rows that a forward of ``rows`` rows computes. One row is a step."""
        if rows == 1:
            return 1
        return min((size for size in self._sizes if size >= rows), default=rows)

    def size_for(self, kind: str, rows: int) -> int:
        """The number of rows that a forward of this kind computes for ``rows``."""
        return PROBE_ROWS if kind == PROBES else self.bucket_of(max(2, rows))

    def record(self, kind: str, size: int) -> None:
        """Records a forward before a request needs it. It runs padding."""
        self._missing.pop((kind, size), None)
        if (kind, size) in self._forwards or kind in self._refused:
            return
        try:
            self._forwards[kind, size] = self._make(kind, size)
        except Exception as error:
            self._refused[kind] = f"{type(error).__name__}: {error}"
            log.warning(self.note)

    @property
    def is_missing_some(self) -> bool:
        return bool(self._missing)

    def record_missing(self) -> None:
        """Records the forward that was missing most often."""
        for wanted, _ in self._missing.most_common(1):
            self.record(*wanted)

    def compile_kernels(self) -> None:
        """Compiles the kernels that place and shift rows."""
        self.kernels.warm_up(self._heads)

    def forget_graphs(self) -> None:
        """Records all forwards anew: the model has changed."""
        self._forwards.clear()
        self._missing.clear()

    def takes(self, segment: Segment) -> bool:
        kv, kind = segment.kv, _kind(segment)
        return (
            kind is not None
            and kind not in self._refused
            and kv.slab is self.slab
            and len(segment) <= (PROBE_ROWS if kind == PROBES else self.most_rows)
            and segment.num_logits <= (MOST_SCORED if kind == SCORED else 1)
            and segment.sampler is None
            and not segment.as_stock
            and not self._is_better_expanded(segment)
            and kv.own_start <= segment.first
            and segment.end <= kv.capacity <= MOST_KEYS
        )

    def _is_better_expanded(self, segment: Segment) -> bool:
        """Whether so many rows of latents attend to so many that expanding these pays."""
        if self.slab.shape.sides == 2 or not segment.is_plain:
            return False
        return self._heads * len(segment) * segment.end > MOST_ABSORBED

    def run(self, segment: Segment) -> torch.Tensor | None:
        """The logits of a segment, ``[num_logits, vocab]``; None if it does not fit."""
        kind = _kind(segment)
        assert kind is not None
        forward = self._find(kind, self.size_for(kind, len(segment)))
        if forward is None:
            return None
        host = torch.device("cpu")
        rows = segment.position_ids(host)
        holding = segment.kv.holding
        table = self.slab.table[holding.row, : len(holding.pages)]
        if not forward.run(segment.token_ids.to(host), rows, table, segment.hook):
            return None
        self.num_runs += 1
        logits: torch.Tensor = forward.result
        return logits[len(logits) - segment.num_logits :].clone()

    def _find(self, kind: str, size: int) -> CapturedForward[Any] | None:
        """A forward of this kind with room for so many rows. If there is a larger one only, that
        is taken a few times: requests would wait longer for one to be recorded, which idle time may
        do."""
        wanted = kind, size
        if wanted not in self._forwards:
            larger = [one for tried, one in self._forwards if tried == kind and one > size]
            if larger and self._missing[wanted] < MOST_MISSED:
                self._missing[wanted] += 1
                return self._forwards[kind, min(larger)]
            self.record(*wanted)
        return self._forwards.get(wanted)

    def _make(self, kind: str, size: int) -> CapturedForward[Any]:
        kernels, capacity = self.kernels, min(self.slab.most_rows, MOST_KEYS)
        probes = kind == PROBES
        rows = FixedRows(kernels, self._heads, size, capacity, in_pages=probes)
        hook: FixedHook[Any] | None = None
        if probes:
            hook = FixedMass(kernels, rows)
        elif kind == REPAIRS:
            hook = FixedShift(kernels, size, capacity, rows.table)
        batch: CapturedBatch | None = None
        scored = MOST_SCORED if kind == SCORED else 1
        before_last = torch.arange(1 - scored, 1, device=kernels.pages.device)

        def model(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            hook: Hook | None,
            attention: Attention,
        ) -> torch.Tensor:
            nonlocal batch
            if batch is None:
                batch = CapturedBatch(self.slab, size, hook, attention)
            batch.load(slots)
            try:
                which = (rows.last + before_last).clamp(min=0)
                return self._run_rows(ids.long(), positions, batch, which)
            except EnoughLayers:
                return rows.last

        def capture(run: Callable[[], Any]) -> Callable[[], Any]:
            if all(kind != tried for tried, _ in self._forwards):
                run()  # one that fails is refused; one that merely cannot be recorded is not
            return self._capture(run, kind)

        return CapturedForward(model, kernels, rows, hook, capture)


def _kind(segment: Segment) -> str | None:
    """The kind of forward that a segment is; None if it is another."""
    rows = ROWS if segment.num_logits <= 1 else SCORED
    kind = rows if segment.hook is None else segment.hook.kind
    if segment.absent is not None and kind != PROBES:
        return None
    return kind if (segment.until is not None) == (kind == PROBES) else None
