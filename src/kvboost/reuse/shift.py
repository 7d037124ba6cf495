"""The shift: correcting stale rows by the average change of the recomputed rows of their span.

A moved passage was read after other text, so within one span the error of keys and values is
largely one shared offset. The recomputed rows of the span show that offset, layer by layer, and it
is added to the other rows before any row attends to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvboost.model.kv import RequestKV
from kvboost.model.native import moved_rows
from kvboost.model.native.moved_rows import RecomputedRows
from kvboost.reuse.rope import CosSin, Rotation

SHIFT_STRENGTH = 0.8
"""How much of the mean error is applied if donor and prompt share no context."""
PRIOR_ROWS = 4
"""A mean over ``n`` rows is weighted by ``n / (n + PRIOR_ROWS)``."""


@dataclass(frozen=True)
class Spans:
    """Rows that share one offset. ``span_of``, ``[prompt]``, is -1 for rows that are not moved.
    ``resemblance``, ``[spans]``: if a donor's context was similar, errors are small and less alike,
    so less of their mean is applied. ``seen``, ``[spans]``: how many rows have shown the offset in
    earlier rounds of the same repair."""

    span_of: torch.Tensor
    resemblance: torch.Tensor
    seen: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Spans:
        seen = None if self.seen is None else self.seen.to(device)
        return Spans(self.span_of.to(device), self.resemblance.to(device), seen)

    def between(self, start: int, end: int) -> Spans:
        """The spans of rows ``[start, end)`` alone."""
        span_of = self.span_of.clone()
        span_of[:start] = span_of[end:] = -1
        return replace(self, span_of=span_of)

    def after(self, fresh: torch.Tensor) -> Spans:
        """The spans for the next round, when rows ``fresh``, ``[prompt]``, are recomputed. Those
        are not shifted any more, and the other rows have the offset that they have shown."""
        which = self.span_of[fresh & (self.span_of >= 0)]
        shown = torch.bincount(which, minlength=len(self.resemblance))
        seen = shown if self.seen is None else self.seen + shown
        return replace(self, span_of=self.span_of.masked_fill(fresh, -1), seen=seen)


def shift_weights(positions: torch.Tensor, spans: Spans) -> torch.Tensor | None:
    """What each moved one of the recomputed ``positions`` adds to the offset of its span; None if
    there are no rows to learn from or none to shift."""
    which = spans.span_of[positions]
    which = which[which >= 0]
    if not 2 <= len(which) < int((spans.span_of >= 0).sum()):
        return None
    return row_weights(which, spans.resemblance, spans.seen)


def row_weights(
    which: torch.Tensor, resemblance: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """What each recomputed row adds to the offset of its span; ``which``, ``[rows]``, are the
    spans, ``resemblance`` and ``seen`` those of :class:`Spans`."""
    count = torch.zeros(len(resemblance), dtype=torch.int64, device=which.device)
    count.scatter_add_(0, which, torch.ones_like(which))
    known = count + PRIOR_ROWS if seen is None else count + PRIOR_ROWS + seen
    trust = torch.where(count >= 2, count / known, 0.0)
    strength = SHIFT_STRENGTH * (1 - resemblance)
    return (strength * trust / count.clamp(min=1))[which]


class Shift:
    """A hook of the forward that recomputes some rows of moved spans. In every layer it adds the
    mean difference between fresh and stale rows to the other rows of the span, both keys and
    values. Keys are compared at position 0 and the difference is rotated to each row's position.

    ``positions`` are all rows of the segment, in order.
    """

    def __init__(self, rotation: Rotation, positions: torch.Tensor, spans: Spans) -> None:
        self.positions = positions
        self.spans = spans
        self._rotation = rotation
        weights = shift_weights(positions, spans)
        self.useful = weights is not None
        if weights is None:
            return
        self._index = (spans.span_of[positions] >= 0).nonzero()[:, 0]
        self._fresh = positions[self._index]
        moved = (spans.span_of >= 0).nonzero()[:, 0]
        # The shift touches all rows between the first and the last moved one. Rows that are not
        # moved get a zero offset, and fresh rows are overwritten right after.
        self._start, self._end = int(moved[0]), int(moved[-1]) + 1
        num_spans = len(spans.resemblance)
        between = spans.span_of[self._start : self._end]
        self._offset_of = torch.where(between >= 0, between, num_spans)
        numbers = torch.arange(num_spans + 1, device=positions.device)[:, None]
        which = spans.span_of[self._fresh]
        self._rows = (self._index, self._fresh, which, (which == numbers) * weights, weights)
        self._cos_sin: dict[int, tuple[CosSin, CosSin]] = {}

    @property
    def touched(self) -> range:
        """The rows that may change. Only if it is useful."""
        return range(self._start, self._end)

    def on_fresh(self, layer: int, kv: RequestKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0:  # its keys and values depend on the token alone, so none is stale
            return
        here, there = self._rotations(layer, keys)
        by_cos, by_sin, of_values = moved_rows.errors(
            kv, layer, keys, values, RecomputedRows(*self._rows, *here)
        )
        # Rotate back to position 0, which commutes with the sum.
        along = by_cos - self._rotation.quarter_turn(by_sin)
        across = self._rotation.quarter_turn(along)
        moved_rows.shift(kv, layer, self._start, self._offset_of, (along, across), there, of_values)

    def on_query(
        self, layer: int, kv: RequestKV, query: torch.Tensor, scale: float, window: int | None
    ) -> None: ...

    def _rotations(self, layer: int, keys: torch.Tensor) -> tuple[CosSin, CosSin]:
        """The rotations of the fresh rows and of all touched rows, over all channels; computed once
        for each kind of layer."""
        kind = self._rotation.kinds[layer]
        if kind not in self._cos_sin:
            touched = torch.arange(self._start, self._end, device=keys.device)
            here, there = (
                self._rotation.spread(self._rotation.cos_sin(layer, rows), keys.shape[-1])
                for rows in (self._fresh, touched)
            )
            cos, sin = (part.to(keys.dtype) for part in there)
            self._cos_sin[kind] = here, (cos, sin)
        return self._cos_sin[kind]
