"""The results of a lookup: stored rows and the rows of a prompt they serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvboost.cache.chunk import ChunkInfo, Lineage
from kvboost.tokens.hashing import ChunkKey


class Hit(NamedTuple):
    """``num_tokens`` rows of ``chunk`` from ``offset`` on serve rows from ``start`` of a prompt.
    ``chunk`` says what the chunk must be; ``tier`` is where it is."""

    chunk: ChunkInfo
    start: int
    num_tokens: int
    offset: int = 0
    tier: str = "ram"
    turn: int = 0
    """The distance by which its keys are rotated further than its rows are moved: see
    ``ChunkInfo.lag``."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_slow(self) -> bool:
        """Whether its chunk must be read from a folder or over a network."""
        return self.tier in ("disk", "remote")

    @property
    def distance(self) -> int:
        """The distance by which these rows are moved."""
        return self.start - (self.chunk.base_position + self.offset)

    @property
    def rotated_by(self) -> int:
        """By how many positions its keys are rotated."""
        return self.distance + self.turn

    def clip(self, start: int, end: int) -> Hit:
        """The part that serves rows ``[start, end)``."""
        if start <= self.start and end >= self.end:
            return self
        start, end = max(start, self.start), min(end, self.end)
        offset = self.offset + start - self.start
        return self._replace(start=start, num_tokens=end - start, offset=offset)


@dataclass(slots=True)
class MovedRun:
    """Consecutive rows of a prompt that are cached at another position. ``resemblance`` compares
    the text before them here and there: what both share, divided by the longer of the two."""

    hits: tuple[Hit, ...]
    resemblance: float
    start: int = field(init=False)
    end: int = field(init=False)
    is_exact: bool = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.end = self.hits[0].start, self.hits[-1].end
        self.is_exact = all(hit.chunk.lineage is Lineage.EXACT for hit in self.hits)

    @property
    def rows_before(self) -> int:
        """The number of rows before them, here or there, whichever is larger."""
        first = self.hits[0]
        return max(1, first.start, first.chunk.base_position + first.offset)

    @property
    def rows_changed(self) -> float:
        """The number of ``rows_before`` that are not shared."""
        return (1 - self.resemblance) * self.rows_before

    def clip(self, start: int, end: int) -> MovedRun:
        """The part that serves rows ``[start, end)``. The rows before it here are before it there
        as well."""
        if start <= self.start and end >= self.end:
            return self
        hits = (hit.clip(start, end) for hit in self.hits if hit.start < end and hit.end > start)
        clipped = MovedRun(tuple(hits), self.resemblance)
        if clipped.start > self.start:
            clipped.resemblance = max(0.0, 1 - self.rows_changed / clipped.rows_before)
        return clipped


@dataclass(frozen=True)
class KnownRows:
    """The stored rows that serve a prompt. ``exact`` serves its beginning; ``approximate``
    continues it in place; ``moved`` runs follow both and may overlap one another."""

    exact: tuple[Hit, ...] = ()
    approximate: tuple[Hit, ...] = ()
    moved: tuple[MovedRun, ...] = ()
    matched: int = 0
    """Of a model with states: how many of the first rows are known. Those after the last state,
    where ``exact`` ends, cannot be used."""

    @property
    def in_place(self) -> tuple[Hit, ...]:
        return (*self.exact, *self.approximate)

    def after(self, row: int) -> KnownRows:
        """The part that serves rows from ``row`` on, which follow exact rows. If the known exact
        rows end before ``row``, the approximate rows that continue them are left out."""
        if not row:
            return self
        exact = tuple(hit.clip(row, hit.end) for hit in self.exact if hit.end > row)
        reaches = bool(self.exact) and self.exact[-1].end >= row
        moved = (run.clip(row, run.end) for run in self.moved if run.end > row)
        return KnownRows(exact, self.approximate if reaches else (), tuple(moved))

    def gaps(self, end: int, least: int) -> list[tuple[int, int]]:
        """The rows ``[start, stop)`` before ``end`` that nothing covers, where ``least`` or more
        are together."""
        found = []
        row = self.in_place[-1].end if self.in_place else 0
        for start, stop in [*((run.start, run.end) for run in self.moved), (end, end)]:
            if start - row >= least:
                found.append((row, start))
            row = max(row, stop)
        return found

    def hits(self) -> Iterator[Hit]:
        yield from self.in_place
        for run in self.moved:
            yield from run.hits

    def keys(self) -> Iterator[ChunkKey]:
        return (hit.chunk.key for hit in self.hits())


class EarlyLookup(NamedTuple):
    """The cached rows of a prompt at the time it arrived, before its turn came."""

    known: KnownRows
    newest: int
    """``Catalogue.newest`` at that time."""
