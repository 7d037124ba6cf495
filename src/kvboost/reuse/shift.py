"""The shift: correcting stale rows by the average change of the recomputed rows near them.

A moved passage was read after other text, so within one span the error of keys and values is
largely one shared offset. The recomputed rows of the span show that offset, layer by layer, and it
is added to the other rows before any row attends to them. Every span is divided into blocks: rows
of a block get an offset to which the recomputed rows near them add more than those far away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvboost.model.execution.segment import Hook, heads_first
from kvboost.model.native import moved_rows
from kvboost.model.native.moved_rows import RecomputedRows
from kvboost.reuse.rope import AnyRotation, CosSin

PRIOR_ROWS = 4
"""A mean over ``n`` rows is weighted by ``n / (n + PRIOR_ROWS)``."""
BLOCKS = 8
"""Each span has so many."""
REACH = 16.0
"""A recomputed row counts by a factor of e less, every so many tokens away."""
FAR_ROWS = 0.5
"""The mean over the whole span counts as much as so many recomputed rows in a block itself."""
ERROR_WEIGHT = 4.0
"""A recomputed row counts ``1 / (1 + ERROR_WEIGHT * e)`` times, where ``e`` is its squared error
relative to the mean of its span. A few rows have errors of their own that are many times as large,
and say nothing about the others."""

Positions = np.ndarray[Any, np.dtype[np.int64]]
"""Of rows of a prompt, increasing. The host chooses rows: a GPU would wait for its many small
steps."""
Which = np.ndarray[Any, np.dtype[np.bool_]]
"""``[prompt]``: true for some of its rows."""
Floats = np.ndarray[Any, np.dtype[np.float32]]

_NUMBER = np.arange(BLOCKS, dtype=np.float32)
_APART = abs(_NUMBER[:, None] - _NUMBER)
"""``[BLOCKS, BLOCKS]``: how many blocks lie between two."""


@dataclass(frozen=True)
class Spans:
    """Rows that share an offset, more or less. ``block_of``, ``[prompt]``, is the block of each
    row, and -1 for rows that are not moved; span ``n`` has the blocks from ``n * BLOCKS`` on.
    ``block_tokens``, ``[spans]``: how long these are. All on the host."""

    block_of: np.ndarray[Any, np.dtype[np.int64]]
    block_tokens: Floats

    @classmethod
    def of(cls, ranges: Sequence[range], num_tokens: int) -> Spans:
        """The spans at ``ranges`` of a prompt."""
        block_of = np.full(num_tokens, -1)
        for number, rows in enumerate(ranges):
            block_of[rows.start : rows.stop] = _blocks(len(rows)) + number * BLOCKS
        tokens = np.array([len(rows) / BLOCKS for rows in ranges], np.float32)
        return cls(block_of, tokens)

    def between(self, start: int, end: int) -> Spans:
        """The spans of rows ``[start, end)`` alone."""
        block_of = self.block_of.copy()
        block_of[:start] = block_of[end:] = -1
        return replace(self, block_of=block_of)

    def weights(self, positions: Positions) -> Floats | None:
        """The share of each of the recomputed ``positions`` in the offset of a block:
        ``[spans, BLOCKS, BLOCKS]``, of the block in dimension 1, if it is in the one in dimension
        2. None if there are no rows to learn from or none to shift."""
        rows = self.rows_by_block(positions)[:, None]
        if not 2 <= rows.sum() < np.count_nonzero(self.block_of >= 0):
            return None
        count = rows.sum(2, keepdims=True)
        near = np.exp(_APART * (self.block_tokens / -REACH)[:, None, None])
        share = near + FAR_ROWS / np.maximum(count, 1)
        share /= (near * rows).sum(2, keepdims=True) + FAR_ROWS
        weights: Floats = np.where(count >= 2, count / (count + PRIOR_ROWS), 0) * share
        return weights

    def rows_by_block(self, positions: Positions | Which) -> Floats:
        """The number of rows at ``positions``, or where it is true, in each block:
        ``[spans, BLOCKS]``."""
        others = len(self.block_tokens) * BLOCKS  # the number of rows in no block comes last
        blocks = self.block_of[positions] % (others + 1)
        count = np.bincount(blocks, minlength=others + 1)[:others]
        return count.astype(np.float32).reshape(-1, BLOCKS)


@cache
def _blocks(length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The block of each row of a span."""
    return np.arange(length) * BLOCKS // length


class Shift(Hook):
    """A hook of the forward that recomputes some rows of moved spans. In every layer it adds the
    mean difference between fresh and stale rows near them to the other rows of the span, both keys
    and values; rows that differ much count less. Keys are compared at position 0, and the
    difference is rotated to the position of each row.

    ``positions``, on the device, are all rows of the segment, in order.
    """

    def __init__(self, rotation: AnyRotation, positions: torch.Tensor, spans: Spans) -> None:
        self.args = (positions, spans)
        self._rotation = rotation
        at, device = positions.cpu().numpy(), positions.device
        weights = spans.weights(at)
        self.useful = weights is not None
        if weights is None:
            return
        total = weights @ spans.rows_by_block(at)[..., None]
        self._weights, self._total, block_of = (
            torch.from_numpy(part).to(device) for part in (weights, total, spans.block_of)
        )
        self._index = (block_of[positions] >= 0).nonzero()[:, 0]
        self._fresh = positions[self._index]
        moved = np.flatnonzero(spans.block_of >= 0)
        # The shift touches all rows between the first and the last moved one. Rows that are not
        # moved get a zero offset, and fresh rows are overwritten right after.
        self._start, self._end = int(moved[0]), int(moved[-1]) + 1
        num_blocks = weights.shape[0] * BLOCKS
        between = block_of[self._start : self._end]
        self._offset_of = torch.where(between >= 0, between, num_blocks)
        which = block_of[self._fresh]
        self._rows = (self._index, self._fresh, self._end, which, num_blocks, BLOCKS, ERROR_WEIGHT)
        self._cos_sin: dict[int, tuple[CosSin, CosSin]] = {}

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0:  # its keys and values depend on the token alone, so none is stale
            return
        kv, keys, values = self.kv, heads_first(keys), heads_first(values)
        here, there = self._rotations(layer, keys)
        rows = RecomputedRows(*self._rows, *here)
        by_cos, by_sin, of_values = self._offsets(*moved_rows.errors(kv, layer, keys, values, rows))
        # Rotate back to position 0, which commutes with the sum.
        rotation, _ = self._rotation.at(layer)
        along = by_cos - rotation.quarter_turn(by_sin)
        across = rotation.quarter_turn(along)
        moved_rows.shift(kv, layer, self._start, self._offset_of, (along, across), there, of_values)

    def _offsets(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The offsets of all blocks and a last one of zero, ``[3, kv_heads, blocks + 1, dim]``,
        given the errors that the rows of each block add up to, ``[3, kv_heads, blocks, dim]``, and
        what these rows count as keys and as values, ``[2, kv_heads, blocks]``."""
        sums, counts = (
            self._weights @ part.view(*part.shape[:2], -1, BLOCKS, width)
            for part, width in ((sums, sums.shape[3]), (counts, 1))
        )
        scale = self._total / counts.clamp(min=1e-30)
        means = sums * torch.cat([scale[:1], scale])  # keys come twice
        return torch.nn.functional.pad(means.flatten(2, 3), (0, 0, 0, 1))

    def _rotations(self, layer: int, keys: torch.Tensor) -> tuple[CosSin, CosSin]:
        """The rotations of the fresh rows and of all touched rows, over all channels; computed once
        for each kind of layer."""
        kind = self._rotation.kinds[layer]
        if kind not in self._cos_sin:
            touched = torch.arange(self._start, self._end, device=keys.device)
            rotation, number = self._rotation.at(layer)
            here, there = (
                rotation.spread(rotation.cos_sin(number, rows), keys.shape[-1])
                for rows in (self._fresh, touched)
            )
            cos, sin = (part.to(keys.dtype) for part in there)
            self._cos_sin[kind] = here, (cos, sin)
        return self._cos_sin[kind]
