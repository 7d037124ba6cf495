"""A tier with an eviction order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvboost.cache.eviction.policy import Entry, EvictionPolicy
from kvboost.cache.tiers.base import Tier
from kvboost.tokens.hashing import ChunkKey


class OrderedTier:
    """The chunks of one tier, in the order in which they would be evicted. A chunk stays as long as
    a chunk that follows it is in the same tier. Not thread-safe: the store holds its lock around
    every call."""

    def __init__(self, tier: Tier, policy: EvictionPolicy, max_chunks: int | None = None) -> None:
        self.tier = tier
        self._policy = policy
        self._max_chunks = max_chunks
        self._parents: dict[ChunkKey, ChunkKey] = {}
        self._children: Counter[ChunkKey] = Counter()
        self._new: dict[ChunkKey, Entry] = {}

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def used_share(self) -> float:
        """How much of its budget is taken, of bytes or of chunks."""
        of_bytes = self.tier.nbytes / max(1, self.tier.max_bytes)
        return max(of_bytes, len(self) / self._max_chunks if self._max_chunks else 0.0)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._parents

    def keys(self) -> list[ChunkKey]:
        return list(self._parents)

    def add(self, entry: Entry) -> None:
        """A chunk was put into the tier. Chunks of the same request are ordered together by
        ``order_new``, parents first; until then all others are evicted before them."""
        self._parents[entry.key] = entry.parent
        self._children[entry.parent] += 1
        self._new[entry.key] = entry

    def order_new(self) -> None:
        """Orders the chunks that were added since the last call."""
        if self._new:
            self._policy.add(list(self._new.values()))
            self._new = {}

    def restore(self, entries: Sequence[Entry]) -> None:
        """These were found in the tier, those used longest ago first."""
        for entry in entries:
            self._parents[entry.key] = entry.parent
            self._children[entry.parent] += 1
        self._policy.restore(entries)

    def touch(self, *paths: Sequence[ChunkKey]) -> None:
        """A request used these paths, each from its first chunk on."""
        self._policy.touch(*paths)

    def remove(self, key: ChunkKey) -> None:
        """A chunk has left the tier. Unknown keys are ignored."""
        if key in self._new:
            self.order_new()
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
            self._policy.remove(key)

    def clear(self) -> None:
        """Forgets what is in the tier."""
        for key in self.keys():
            self.remove(key)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for one more chunk of ``nbytes``."""
        room = self._max_chunks is None or len(self) < self._max_chunks
        return room and self.tier.nbytes + nbytes <= self.tier.max_bytes

    def next_to_go(self, is_held: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The chunk to evict next; None if there is none that may be evicted."""
        for key in self._policy:
            if key not in self._children and not is_held(key):
                return key
        if not self._new:
            return None
        self.order_new()
        return self.next_to_go(is_held)

    def last_to_go(self, limit: int) -> list[tuple[ChunkKey, int]]:
        """The chunks that would be evicted last, the very last first, and how often each was
        used."""
        self.order_new()
        return [(key, self._policy.uses(key)) for key in reversed(list(self._policy)[-limit:])]

    def check_integrity(self) -> list[str]:
        self.order_new()
        here, held, ordered = set(self._parents), set(self.tier.keys()), set(self._policy)
        if here == held == ordered:
            return []
        return [
            f"{self.tier.name}: {len(here)} known, {len(held)} in the tier and "
            f"{len(ordered)} in the eviction order differ"
        ]
