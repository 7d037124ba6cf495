"""The shift: what a span's recomputed rows tell about the rows that were not.

Within one span the error of moved keys and values is to a good part one shared offset: the whole
passage was read behind other text. Its recomputed rows show that offset, layer by layer, and the
rest of the span is moved by it before anything attends to them.
"""

from __future__ import annotations

import torch

from kvboost.reuse.probe import LayerRows
from kvboost.reuse.rope import Rotation, Turns

STRENGTH = 0.7
PRIOR_ROWS = 4
"""A mean over ``n`` rows is trusted ``n / (n + PRIOR_ROWS)``."""


class Shift:
    """A hook of the forward that recomputes some rows of moved spans. In every layer it adds to
    the other rows of a span, keys and values alike, the mean difference between fresh and stale
    of those recomputed: keys where position plays no part, turned back to where they stand.

    ``positions`` are all rows of the segment; ``span_of`` is ``[prompt]``: which span a moved row
    belongs to, -1 for rows that are not moved.
    """

    def __init__(self, rotation: Rotation, positions: torch.Tensor, span_of: torch.Tensor) -> None:
        self._rotation = rotation
        spans = span_of[positions]
        self._index = (spans >= 0).nonzero()[:, 0]
        self._fresh = positions[self._index]
        self._span_of_fresh = spans[self._index]
        stale = span_of.clone()
        stale[positions] = -1
        self._stale = (stale >= 0).nonzero()[:, 0]
        self._span_of_stale = stale[self._stale]
        num_spans = int(span_of.max()) + 1 if len(span_of) else 0
        count = torch.bincount(self._span_of_fresh, minlength=num_spans).float()
        trust = torch.where(count >= 2, count / (count + PRIOR_ROWS), torch.zeros_like(count))
        self._mean_weight = (STRENGTH * trust / count.clamp(min=1))[:, None]
        self._end = int(positions[-1]) + 1
        self._turns: dict[int, tuple[Turns, Turns]] = {}

    @property
    def useful(self) -> bool:
        """Whether there is something to learn from and something to move."""
        return bool(len(self._stale)) and bool((self._mean_weight > 0).any())

    def on_fresh(self, layer: int, kv: LayerRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0:  # its keys and values depend on the token alone: nothing is stale
            return
        stale_keys, stale_values = (rows[0] for rows in kv.layer(layer, 0, self._end))
        here, there = self._turns_of(layer)
        error = keys[0, :, self._index].float() - stale_keys[:, self._fresh].float()
        offset = self._offsets(self._rotation.turn(error, here, back=True))
        stale_keys[:, self._stale] += self._rotation.turn(offset, there).to(keys.dtype)
        error = values[0, :, self._index].float() - stale_values[:, self._fresh].float()
        stale_values[:, self._stale] += self._offsets(error).to(values.dtype)

    def on_query(
        self, layer: int, kv: LayerRows, query: torch.Tensor, scale: float, window: int | None
    ) -> None: ...

    def _turns_of(self, layer: int) -> tuple[Turns, Turns]:
        """Turns of the fresh and of the stale rows; made once per kind of layer."""
        kind = self._rotation.kinds[layer]
        if kind not in self._turns:
            self._turns[kind] = (
                self._rotation.turns(layer, self._fresh),
                self._rotation.turns(layer, self._stale),
            )
        return self._turns[kind]

    def _offsets(self, error: torch.Tensor) -> torch.Tensor:
        """``error`` of the fresh rows, ``[heads, fresh, dim]``, as every stale row's share."""
        sums = error.new_zeros(error.shape[0], len(self._mean_weight), error.shape[2])
        sums.index_add_(1, self._span_of_fresh, error)
        return (sums * self._mean_weight)[:, self._span_of_stale]
