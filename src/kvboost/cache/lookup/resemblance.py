"""Compares the text before cached rows with the text before the rows of a prompt that they serve.

Texts are compared by windows of their tokens, whatever chunks they were stored as: agents that
read each other's messages store the same text after different beginnings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvboost.cache.chunk import ChunkInfo
from kvboost.cache.lookup.anchors import AnchorIndex
from kvboost.cache.lookup.hits import Hit
from kvboost.tokens.hashing import ChunkKey

_SLOTS = 1 << 14
_NEVER = 1 << 40
"""After the end of any prompt."""


def resemblances(
    hits: Sequence[Hit],
    infos: Mapping[ChunkKey, ChunkInfo],
    anchors: AnchorIndex,
    polynomials: npt.NDArray[np.uint64],
) -> list[float]:
    """Of each hit: the tokens that precede both its rows and those that it serves, divided by the
    longer of the two texts before them. ``hits`` are in order, and ``polynomials`` are those of
    the prompt's windows."""
    numbers: dict[ChunkKey, int] = {}
    paths = [_path(hit, infos, numbers) for hit in hits]
    windows = anchors.windows(list(numbers))
    last = max(0, hits[-1].start - windows.length + 1)
    ends = _first_ends(polynomials[:last], windows.polynomials, windows.length)
    weights = windows.sizes / np.maximum(1, windows.counts)

    path = np.fromiter(chain.from_iterable(paths), np.intp)
    lengths = np.array([len(one) for one in paths])
    begins = lengths.cumsum() - lengths  # of each hit, its own chunk
    starts, rows, before = np.array(
        [(hit.start, hit.offset, hit.chunk.base_position + hit.offset) for hit in hits]
    ).T
    are_shared = ends[path] <= starts.repeat(lengths)[:, None]
    are_shared[begins] &= windows.offsets[path[begins]] + windows.length <= rows[:, None]
    shared = np.add.reduceat(are_shared.sum(1) * weights[path], begins)
    alike: list[float] = np.minimum(
        1.0, shared / np.maximum(1, np.maximum(starts, before))
    ).tolist()
    return alike


def _path(hit: Hit, infos: Mapping[ChunkKey, ChunkInfo], numbers: dict[ChunkKey, int]) -> list[int]:
    """The numbers of a hit's chunk and of all before it, as far as they are known."""
    info = hit.chunk
    path = [numbers.setdefault(info.key, len(numbers))]
    # As ``preceding``; this is the innermost loop of a lookup.
    while (earlier := infos.get(info.before)) is not None:
        if earlier.base_position >= info.base_position:
            break
        path.append(numbers.setdefault(earlier.key, len(numbers)))
        info = earlier
    return path


def _first_ends(
    prompt: npt.NDArray[np.uint64], windows: npt.NDArray[np.uint64], length: int
) -> npt.NDArray[np.int64]:
    """Where each of ``windows`` ends in ``prompt`` for the first time."""
    wanted = np.zeros(_SLOTS, bool)
    wanted[_slots(windows)] = True
    # Few are left: the windows of a chunk do not overlap, but for the last one.
    (rows,) = wanted[_slots(prompt)].nonzero()
    if not len(rows):
        return np.full(windows.shape, _NEVER)
    values = prompt[rows]
    order = values.argsort(kind="stable")  # the first of equal ones stays the first
    values, rows = values[order], rows[order]
    at = np.minimum(values.searchsorted(windows), len(values) - 1)
    return np.where(values[at] == windows, rows[at] + length, _NEVER)


def _slots(polynomials: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    mixed = polynomials ^ (polynomials >> np.uint64(32))
    return (mixed & np.uint64(_SLOTS - 1)).view(np.int64)
