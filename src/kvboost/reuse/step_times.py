"""The times of decode steps by their number of rows. It handles no tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

MOST_ROWS = 136
"""The most rows of a decode step, all requests and their drafts together, that is measured."""
KEPT = 9
"""The number of times that are kept of each size."""
LEAST = 3
"""A size that was seen less often is not trusted: it may have met a busy moment."""
FIXED_ROWS = 24
"""The assumed fixed cost of a forward, in rows, until it has been measured."""
RECENT = 256
"""Times of so many steps count. What is not seen any more is forgotten, so that it is tried again
after the machine was busy."""


def size_of(rows: int) -> int:
    """The number of rows that a step counts as. Drafts have many lengths: if each number counted
    alone, most would be seen too seldom to be trusted."""
    step = 1 if rows <= 12 else 4 if rows <= 32 else 8
    return -(-rows // step) * step


class StepTimes:
    """Not thread-safe. Other programs make steps longer, never shorter, so a size counts with one
    of its shorter times; and a step with more rows takes no less time than one with fewer."""

    def __init__(self) -> None:
        self._times: dict[int, deque[tuple[int, float]]] = {}
        self._num_seen = 0
        self._known: tuple[list[int], list[float]] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        if 1 <= rows <= MOST_ROWS and seconds > 0:
            self._num_seen += 1
            self._times.setdefault(rows, deque(maxlen=KEPT)).append((self._num_seen, seconds))
            self._known = None

    def time(self, rows: int, forward: Callable[[int], float]) -> float:
        """The time of a step of ``rows`` rows, between those of the two nearest sizes that are
        trusted. Beyond these, it changes as ``forward`` does, the time of forwards of any size.
        Sizes larger than any seen are taken to be cheap: they have a cost only after they have
        run."""
        if self._known is None:
            self._known = self._learn()
        sizes, times = self._known
        if not sizes:
            return forward(rows)
        at = min(bisect_left(sizes, rows), len(sizes) - 1)
        if sizes[at] == rows:
            return times[at]
        if sizes[0] < rows < sizes[-1]:
            share = (rows - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            return times[at - 1] + share * (times[at] - times[at - 1])
        ratio = forward(rows) / forward(sizes[at])
        if rows > sizes[at]:
            ratio = min(ratio, (FIXED_ROWS + rows) / (FIXED_ROWS + sizes[at]))
        return times[at] * ratio

    def _learn(self) -> tuple[list[int], list[float]]:
        """The sizes that are trusted, or all if none is, and the time of each."""
        recent = {
            size: [seconds for when, seconds in times if self._num_seen - when < RECENT]
            for size, times in sorted(self._times.items())
        }
        trusted = {size: times for size, times in recent.items() if len(times) >= LEAST}
        chosen = trusted or {size: times for size, times in recent.items() if times}
        typical = [_shorter(times) for times in chosen.values()]
        return list(chosen), rising(typical, [len(times) for times in chosen.values()])


def _shorter(times: Iterable[float]) -> float:
    """The first quartile."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


def rising(values: Iterable[float], weights: Iterable[int]) -> list[float]:
    """The nearest numbers that never fall: where ``values`` do, they become their mean."""
    pools: list[tuple[float, int, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            before, others, more = pools.pop()
            value = (before * others + value * weight) / (others + weight)
            weight, count = weight + others, count + more
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
