"""The data of chunks that are indexed elsewhere: tiers and what moves between them.

Workers hold it, and the scheduler's :class:`kvboost.cache.index.Index` knows what they hold: it
hears of every chunk that has left the last tier.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.mixed import AnyFormat
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.residency import Residency
from kvboost.cache.tiers.stats import RemoteStats, TierStats
from kvboost.cache.tiers.transfers import Transfers
from kvboost.tokens.hashing import ChunkKey


class ChunkData:
    """Thread-safe. A chunk that is fetched is held until it is returned, so that it is not evicted
    on the way. ``format`` is the shape of the model's KV; other data from slow tiers is refused.
    ``state_every``: how many rows apart states are kept, of a model that has some."""

    def __init__(
        self, tiers: Tiers, *, format: AnyFormat | None = None, state_every: int | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._known: set[ChunkKey] = set()
        self._held: Counter[ChunkKey] = Counter()
        self._gone: deque[ChunkKey] = deque()
        self._residency = Residency(tiers, self, policy=LearnedPolicy, state_every=state_every)
        self.transfers = Transfers(tiers, self._residency, self._lock, format)
        self.transfers.open()

    def put(self, chunks: Sequence[KVChunk]) -> None:
        """Keeps new chunks of one sequence, parents first. What finds no room counts as gone, and
        so do the chunks after it."""
        for number, chunk in enumerate(self.transfers.adopt(chunks)):
            with self._lock:
                self._known.add(chunk.key)
                if self._residency.put(chunk):
                    continue
                self._report([refused.key for refused in chunks[number:]])
                break
        with self._lock:
            self._residency.order_new()

    def refuse(self, keys: Sequence[ChunkKey]) -> None:
        """Counts chunks as gone that could not be made."""
        with self._lock:
            self._residency.drop(keys)
            self._report(keys)

    def at_hand(self, planned: Sequence[ChunkInfo]) -> list[KVChunk] | None:
        """The planned chunks if all are in the fastest tier: nothing is copied. None otherwise."""
        chunks = self.transfers.at_hand(planned)
        if chunks is not None:
            with self._lock:
                self._residency.touch([chunk.key for chunk in chunks])
        return chunks

    def fetch(self, planned: Sequence[ChunkInfo]) -> list[KVChunk] | None:
        """The planned chunks; None if one is lost or is not what was planned."""
        keys = [info.key for info in planned]
        if not self.is_ready(keys):
            self.transfers.refresh(now=True)  # another process may have written them
        with self._hold(keys):
            chunks = list(self.transfers.fetch(planned))
        with self._lock:
            self._residency.touch(keys)
        return [chunk for chunk in chunks if chunk is not None] if all(chunks) else None

    def is_ready(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether all of ``keys`` are in memory."""
        with self._lock:
            return all(self._residency.ready(key) is not None for key in keys)

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Forgets ``keys`` in every tier of this machine."""
        with self._lock:
            self._residency.drop(keys)
            self._known.difference_update(keys)
        self.transfers.await_writing()
        self.transfers.remove_files(keys)

    def purge(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """The same, in the remote store too; returns how many are left, by tier."""
        self.drop(keys)
        return self.transfers.purge(keys)

    def take_gone(self) -> list[ChunkKey]:
        """The chunks that have left the last tier since the last call. Takes no lock: whoever asks
        in every step must not wait for another thread's copies."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def stats(self) -> dict[str, TierStats]:
        """The contents of the tiers. Takes no lock either: its numbers may be some moments
        apart."""
        return self._residency.tier_stats()

    def filled(self) -> list[tuple[int, int]]:
        """The bytes and the chunks of each tier, for whoever asks in every step."""
        return self._residency.filled()

    def remote_stats(self) -> RemoteStats | None:
        """Of the remote store, which is asked; None if there is none."""
        return self.transfers.remote_stats()

    def flush(self) -> None:
        """Writes what is not written yet."""
        self.transfers.flush()

    def close(self) -> None:
        """Writes what is pending and releases everything."""
        self.transfers.close()

    @contextmanager
    def _hold(self, keys: Sequence[ChunkKey]) -> Iterator[None]:
        with self._lock:
            self._known.update(keys)  # the index found them, here or in a slow tier
            self._held.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(keys)
                self._held += Counter()

    # What the residency asks and says, with the lock held.

    def is_held(self, key: ChunkKey) -> bool:
        return key in self._held

    def is_wanted(self, key: ChunkKey) -> bool:
        return key in self._known

    def on_found(self, infos: Sequence[ChunkInfo]) -> None:
        self._known.update(info.key for info in infos)

    def on_described(self, info: ChunkInfo) -> None: ...

    def on_gone(self, key: ChunkKey, how: str = "evicted") -> None:
        if key in self._known:  # else it was dropped, and may be put anew before this is read
            self._report([key])

    def _report(self, keys: Sequence[ChunkKey]) -> None:
        self._known.difference_update(keys)
        self._gone.extend(keys)
