"""Bringing the chunks of one request into a store, many at a time.

What is not known is found out first. Then the rows of all new chunks are copied together, while no
lock is held, and the chunks are entered together: the time of the thread that admits goes into
calls, not into bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvboost.cache.chunk import KVChunk
from kvboost.cache.holdings import Holdings
from kvboost.cache.parts import Naming, Place
from kvboost.cache.quantize import KVData, NewRows
from kvboost.cache.tiers.transfers import Transfers
from kvboost.tokens.hashing import ChunkKey

MOST_ROWS = 2048
"""Rows that are copied together, if that is more than one chunk."""

Pack = Callable[[Sequence[NewRows]], list[KVData]]
"""Gives parts of a request's KV that follow one another, each in memory of its own."""


class Admission:
    """For one call of ``ChunkStore.admit``, which lets one request at a time bring chunks in."""

    def __init__(
        self,
        holdings: Holdings,
        transfers: Transfers,
        naming: Naming,
        lock: threading.RLock,
        turns: frozenset[int] = frozenset(),
    ) -> None:
        """``turns``: rows whose states are kept because a turn ends there."""
        self._holdings, self._transfers, self._naming = holdings, transfers, naming
        self._lock = lock
        self._turns = turns
        self.path: list[ChunkKey] = []
        """The chunks of the sequence that are stored. They are in use until ``run`` returns."""

    def run(self, places: Iterator[Place], pack: Pack) -> int:
        """Keeps the rows of ``places``, parents first, up to one that cannot be kept; returns how
        many chunks are new."""
        new = 0
        try:
            for missing in self._missing(places):
                kept = self._bring_in(missing, pack)
                new += kept
                if kept < len(missing):
                    break
        finally:
            with self._lock:
                self._holdings.residency.order_new()
                self._holdings.release(self.path)
        return new

    def _missing(self, places: Iterator[Place]) -> Iterator[list[Place]]:
        """The places that no chunk holds, in runs of consecutive rows. The chunks that hold the
        others are pinned. A run must be brought in before the next is asked for."""
        run: list[Place] = []
        for place in places:
            found = self._find(place)
            if run and (found is not None or not _belongs(place, run)):
                self._unpin(found)  # it may be evicted for what comes before it
                yield run
                run = []
                found = self._find(place)
            if found is not None:
                place.key = found
                self.path.append(found)
            else:
                place.key = self._naming.name(place)
                run.append(place)
        if run:
            yield run

    def _find(self, place: Place) -> ChunkKey | None:
        with self._lock:
            return self._holdings.find_existing(place)

    def _unpin(self, key: ChunkKey | None) -> None:
        if key is not None:
            with self._lock:
                self._holdings.release([key])

    def _bring_in(self, places: Sequence[Place], pack: Pack) -> int:
        """Takes new chunks in, pinned, up to one that cannot be kept; returns how many."""
        done = 0
        while done < len(places):
            chunks = self._describe(places[done:], pack)
            with self._lock:
                kept, replaced = self._holdings.insert(chunks, self._turns)
            self._transfers.remove_files(replaced)
            self.path += [place.key for place in places[done : done + kept] if place.key]
            done += kept
            if kept < len(chunks) or not chunks:
                break
        return done

    def _describe(self, places: Sequence[Place], pack: Pack) -> Sequence[KVChunk]:
        """The new chunks; only the first of them if there is too little memory, which may be none.
        Needs no lock for as long as it copies."""
        with self._lock:
            parts = [self._holdings.rows_of(place) for place in places]
        try:
            chunks = [
                KVChunk(self._naming.describe(place, data), data)
                for place, data in zip(places, pack(parts), strict=True)
            ]
            return self._transfers.adopt(chunks)
        except (MemoryError, RuntimeError):  # torch is out of memory
            if len(places) > 1:
                return self._describe(places[: len(places) // 2], pack)
            with self._lock:
                self._holdings.counts["failed"] += 1
            return ()


def _belongs(place: Place, run: Sequence[Place]) -> bool:
    """Whether ``place`` can be brought in together with those of ``run``."""
    follows = place.part.start == run[-1].part.end
    return follows and place.part.end - run[0].part.start <= MOST_ROWS
