"""What a lookup finds: stored rows and the rows of a prompt they serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvboost.cache.chunk import ChunkInfo, Lineage
from kvboost.tokens.hashing import ChunkKey


@dataclass(frozen=True)
class Hit:
    """``num_tokens`` rows of ``chunk`` from ``offset`` on serve rows from ``start`` of a prompt.
    It lies in ``tier``."""

    chunk: ChunkInfo
    start: int
    num_tokens: int
    offset: int = 0
    tier: str = "ram"

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def distance(self) -> int:
        """How far these rows are moved."""
        return self.start - (self.chunk.base_position + self.offset)

    def clip(self, start: int, end: int) -> Hit:
        """The part of it that serves rows ``[start, end)``."""
        start, end = max(start, self.start), min(end, self.end)
        offset = self.offset + start - self.start
        return replace(self, start=start, num_tokens=end - start, offset=offset)


@dataclass(frozen=True)
class MovedRun:
    """Rows of a prompt that stand together somewhere else. ``resemblance`` is how alike what
    stands before them here and there is: what both have in common over the longer of the two."""

    hits: tuple[Hit, ...]
    resemblance: float

    @property
    def start(self) -> int:
        return self.hits[0].start

    @property
    def end(self) -> int:
        return self.hits[-1].end

    @property
    def is_exact(self) -> bool:
        return all(hit.chunk.lineage is Lineage.EXACT for hit in self.hits)

    def clip(self, start: int, end: int) -> MovedRun:
        hits = (hit.clip(start, end) for hit in self.hits if hit.start < end and hit.end > start)
        return MovedRun(tuple(hits), self.resemblance)


@dataclass(frozen=True)
class KnownRows:
    """What is known of a prompt. ``exact`` serves its beginning; ``approximate`` goes on from
    there, in place; ``moved`` runs stand behind both and may overlap one another."""

    exact: tuple[Hit, ...] = ()
    approximate: tuple[Hit, ...] = ()
    moved: tuple[MovedRun, ...] = ()

    @property
    def in_place(self) -> tuple[Hit, ...]:
        return (*self.exact, *self.approximate)

    def after(self, row: int) -> KnownRows:
        """What of it serves rows from ``row`` on. Where exact rows end before it, the approximate
        ones that go on from there do not count: ``row`` itself stands behind exact ones."""
        if not row:
            return self
        exact = tuple(hit.clip(row, hit.end) for hit in self.exact if hit.end > row)
        reaches = bool(self.exact) and self.exact[-1].end >= row
        moved = (run.clip(row, run.end) for run in self.moved if run.end > row)
        return KnownRows(exact, self.approximate if reaches else (), tuple(moved))

    def keys(self) -> Iterator[ChunkKey]:
        for hit in self.in_place:
            yield hit.chunk.key
        for run in self.moved:
            for hit in run.hits:
                yield hit.chunk.key
