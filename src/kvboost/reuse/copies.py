"""The mean of several copies of moved text.

What a stored row has wrong is what it took from the text before it. If the same text was read
exactly after several other texts, the mean of its rows, keys rotated to one position, has less of
any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

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
    count = np.zeros(max(run.end for run in found), np.int8)
    for run in chosen:
        count[run.start : run.end] = run.is_exact and run.resemblance <= MOST_RESEMBLANCE
    used = {_name(hit) for run in chosen for hit in run.hits}
    for run in found:
        if run.is_exact:
            for hit in (hit for hit in run.hits if hit.tier == tier and _name(hit) not in used):
                for start, end, copy in list(_alike(count, hit.start, hit.end)):
                    if 1 <= copy < MOST_CONTEXTS:
                        copies[copy - 1].append(hit.clip(start, end))
                        count[start:end] += 1
    return tuple(tuple(copy) for copy in copies if copy)


def _name(hit: Hit) -> tuple[str, int]:
    """The same for hits that take the same rows of a chunk to the same place."""
    return hit.chunk.key, hit.distance


def _alike(count: npt.NDArray[np.int8], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Runs of equal numbers in ``count[start:end]``: where each begins and ends, and the number."""
    changes = np.flatnonzero(np.diff(count[start:end])) + start + 1
    edges = [start, *changes.tolist(), end]
    for begin, stop in pairwise(edges):
        yield begin, stop, int(count[begin])
