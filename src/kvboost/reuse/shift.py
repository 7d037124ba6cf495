"""The shift: what a span's recomputed rows tell about the rows that were not.

Within one span the error of moved keys and values is to a good part one shared offset: the whole
passage was read behind other text. Its recomputed rows show that offset, layer by layer, and the
rest of the span is moved by it before anything attends to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.model.kv import RequestKV
from kvboost.model.native import moved_rows
from kvboost.model.native.moved_rows import RecomputedRows
from kvboost.reuse.rope import CosSin, Rotation

SHIFT_STRENGTH = 0.6
"""How much of a mean error is carried over, where donor and prompt have nothing in common."""
PRIOR_ROWS = 4
"""A mean over ``n`` rows is trusted ``n / (n + PRIOR_ROWS)``."""


@dataclass(frozen=True)
class Spans:
    """Rows that share one offset. ``span_of``, ``[prompt]``, is -1 for rows that are not moved.
    ``resemblance``, ``[spans]``: where a donor's context was close, errors are small and have less
    in common, and less of them is carried over."""

    span_of: torch.Tensor
    resemblance: torch.Tensor

    def between(self, start: int, end: int) -> Spans:
        """Of rows ``[start, end)`` alone."""
        span_of = self.span_of.clone()
        span_of[:start] = span_of[end:] = -1
        return Spans(span_of, self.resemblance)


class Shift:
    """A hook of the forward that recomputes some rows of moved spans. In every layer it adds to
    the other rows of a span, keys and values alike, the mean difference between fresh and stale
    of those recomputed: keys where position plays no part, turned back to where they stand.

    ``positions`` are all rows of the segment, in order.
    """

    def __init__(self, rotation: Rotation, positions: torch.Tensor, spans: Spans) -> None:
        self._rotation = rotation
        self._index = (spans.span_of[positions] >= 0).nonzero()[:, 0]
        self._fresh = positions[self._index]
        moved = (spans.span_of >= 0).nonzero()[:, 0]
        self.useful = 2 <= len(self._fresh) < len(moved)
        """Whether there is something to learn from and something to move."""
        if not self.useful:
            return
        # Everything between the first and the last moved row is touched; rows that are not moved
        # get the offset of no span, and fresh ones are written over right after.
        self._start, self._end = int(moved[0]), int(moved[-1]) + 1
        num_spans = len(spans.resemblance)
        between = spans.span_of[self._start : self._end]
        self._offset_of = torch.where(between >= 0, between, num_spans)
        numbers = torch.arange(num_spans + 1, device=positions.device)[:, None]
        which = spans.span_of[self._fresh]
        of_span = which == numbers
        count = of_span.sum(1, keepdim=True)
        trust = torch.where(count >= 2, count / (count + PRIOR_ROWS), 0.0)
        strength = (
            SHIFT_STRENGTH * (1 - torch.nn.functional.pad(spans.resemblance, (0, 1)))[:, None]
        )
        mean = of_span * (strength * trust / count.clamp(min=1))
        self._rows = (self._index, self._fresh, which, mean, mean.sum(0))
        self._turns: dict[int, tuple[CosSin, CosSin]] = {}

    def on_fresh(self, layer: int, kv: RequestKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0:  # its keys and values depend on the token alone: nothing is stale
            return
        here, there = self._turns_of(layer, keys)
        by_cos, by_sin, of_values = moved_rows.errors(
            kv, layer, keys, values, RecomputedRows(*self._rows, *here)
        )
        # Turned back to where position plays no part, which commutes with adding up.
        along = by_cos - self._rotation.quarter_turn(by_sin)
        across = self._rotation.quarter_turn(along)
        moved_rows.shift(kv, layer, self._start, self._offset_of, (along, across), there, of_values)

    def on_query(
        self, layer: int, kv: RequestKV, query: torch.Tensor, scale: float, window: int | None
    ) -> None: ...

    def _turns_of(self, layer: int, keys: torch.Tensor) -> tuple[CosSin, CosSin]:
        """CosSin of the fresh rows, and of all touched ones, over all channels; made once per kind
        of layer."""
        kind = self._rotation.kinds[layer]
        if kind not in self._turns:
            touched = torch.arange(self._start, self._end, device=keys.device)
            here, there = (
                self._rotation.spread(self._rotation.cos_sin(layer, rows), keys.shape[-1])
                for rows in (self._fresh, touched)
            )
            cos, sin = (part.to(keys.dtype) for part in there)
            self._turns[kind] = here, (cos, sin)
        return self._turns[kind]
