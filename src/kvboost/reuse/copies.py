"""The mean of several copies of moved text.

What a stored row has wrong is what it took from the text before it. If the same text was read
exactly after several other texts, the mean of its rows, keys rotated to one position, has less of
any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvboost.cache.lookup.hits import Hit, MovedRun
from kvboost.config import MOST_CONTEXTS

MOST_RESEMBLANCE = 0.8
"""A copy that was read after more of the same text than this is better than any mean."""


def further_copies(
    found: Sequence[MovedRun], chosen: Sequence[MovedRun], tier: str
) -> tuple[tuple[Hit, ...], ...]:
    """Of all runs ``found`` and in ``tier``, those that hold rows of the ``chosen`` ones a second
    time, a third time and so on; in each, no row comes twice. Rows of the k-th copy have a share of
    ``1 / k`` if they are mixed in this order, so that all copies have the same."""
    if not chosen:
        return ()
    copies: list[list[Hit]] = [[] for _ in range(MOST_CONTEXTS - 1)]
    count = bytearray(max(run.end for run in found))
    for run in chosen:
        if run.is_exact and run.resemblance <= MOST_RESEMBLANCE:
            count[run.start : run.end] = b"\1" * (run.end - run.start)
    used = {_name(hit) for run in chosen for hit in run.hits}
    for run in found:
        if run.is_exact:
            for hit in (hit for hit in run.hits if hit.tier == tier and _name(hit) not in used):
                for start, end, copy in _alike(count, hit.start, hit.end):
                    if 1 <= copy < MOST_CONTEXTS:
                        copies[copy - 1].append(hit.clip(start, end))
                        count[start:end] = bytes([copy + 1]) * (end - start)
    return tuple(tuple(copy) for copy in copies if copy)


def _name(hit: Hit) -> tuple[str, int]:
    """A key that is the same for hits that take the same rows of a chunk to the same place."""
    return hit.chunk.key, hit.rotated_by


def _alike(count: bytearray, start: int, end: int) -> list[tuple[int, int, int]]:
    """Runs of equal numbers in ``count[start:end]``: where each begins and ends, and the number."""
    numbers = count[start:end]
    if numbers.count(numbers[0]) == len(numbers):  # nearly always
        return [(start, end, numbers[0])]
    found = []
    for number, run in groupby(numbers):
        length = sum(1 for _ in run)
        found.append((start, start + length, number))
        start += length
    return found
