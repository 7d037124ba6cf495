"""The chunks that a sequence is stored as, exact and approximate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvboost.cache.chunk import Lineage
from kvboost.tokens.hashing import TokenIds

Cut = Callable[[TokenIds, Sequence[int]], list[tuple[int, int]]]
"""Cuts a sequence into chunks ``[start, end)`` without gaps, none across the given boundaries. The
first chunks must not depend on the tokens after them."""


@dataclass(frozen=True)
class Part:
    """One chunk to be admitted: the ``depth``-th of its sequence."""

    depth: int
    start: int
    end: int
    lineage: Lineage
    branches: bool = False
    """Whether it is the first of an approximate branch."""
    is_parent: bool = False
    """Whether another chunk follows it: then the stored chunk must end where it ends."""


def cut_parts(cuts: list[tuple[int, int]], exact_rows: int) -> Iterator[Part]:
    """The chunks of a sequence. A chunk in which exactness ends comes twice: its exact rows,
    and all of it as the first chunk of the approximate branch::

        exact        |----|----|--|
        approximate            |----|----|
    """
    branched = False
    for depth, (start, end) in enumerate(cuts):
        has_next = depth + 1 < len(cuts)
        if start < exact_rows:
            is_parent = has_next and end <= exact_rows
            yield Part(depth, start, min(end, exact_rows), Lineage.EXACT, is_parent=is_parent)
        if end > exact_rows:
            inexact = Lineage.APPROXIMATE
            yield Part(depth, start, end, inexact, not branched, is_parent=has_next)
            branched = True
