"""How long running answers wait for their next token. It handles no tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

LEAST_SLICE = 32
"""Rows of a prompt in one forward, however long they take: fewer would hardly be faster."""
QUICK_ROWS = 16
"""So few rows take about as long as one: they wait for the weights."""


class Costs(Protocol):
    """How long forwards take."""

    def rows_within(self, seconds: float, keys: int) -> int | None: ...


class Patience:
    """Says what may run before answers must go on, so that none waits longer than ``max_pause``
    seconds for its next token; 0 sets no limit. Use it within one thread."""

    def __init__(
        self, max_pause: float, cost: Costs, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_pause = max_pause
        self._cost = cost
        self._clock = clock
        self._answered = clock()
        self._step_seconds = 0.0
        self._part_began = self._answered
        self._part_seconds = 0.0

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self._max_pause > 0

    def answered(self, began: float) -> None:
        """Notes that answers have their next tokens now, of a step that ``began`` then."""
        self._answered = self._part_began = self._clock()
        self._step_seconds = self._answered - began

    def is_over(self) -> bool:
        """Whether answers would wait too long if they had to wait for one more part of a forward.
        Call it before each part: layers have a long and a short part, so the next one is taken to
        last as long as the longer of the last two. Where the answers' own steps take long, the
        forward goes on for as long as one of them: it would hardly end otherwise."""
        now = self._clock()
        last, self._part_seconds = self._part_seconds, now - self._part_began
        self._part_began = now
        longer = max(last, self._part_seconds)
        limit = max(self._max_pause, 2 * self._step_seconds)
        return now + longer + self._step_seconds > self._answered + limit

    def allows(self, rows: int, keys: int) -> bool:
        """Whether a forward of ``rows`` rows over ``keys`` keys is known to be done in time."""
        within = self._cost.rows_within(self._max_pause, keys)
        return rows <= max(QUICK_ROWS, within or 0)

    def slice_rows(self, most: int, keys: int) -> int:
        """How many rows of a prompt, at most ``most``, a forward computes in time: a power of two,
        so that slices of one size end where those of another do."""
        within = self._cost.rows_within(self._max_pause, keys) if self else None
        if within is None or within >= most:
            return most
        return min(most, max(LEAST_SLICE, 1 << within.bit_length() >> 1))
