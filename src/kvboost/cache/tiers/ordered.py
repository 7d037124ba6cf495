"""A tier with an order: who leaves it first when room is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvboost.cache.eviction.policy import Entry, EvictionPolicy
from kvboost.cache.tiers.base import Tier
from kvboost.tokens.hashing import ChunkKey


class OrderedTier:
    """What the store knows of one tier. A chunk stays for as long as one that was read behind it
    is there too. Not thread-safe: the store holds its lock around every call."""

    def __init__(self, tier: Tier, policy: EvictionPolicy, max_chunks: int | None = None) -> None:
        self.tier = tier
        self._policy = policy
        self._max_chunks = max_chunks
        self._parents: dict[ChunkKey, ChunkKey] = {}
        self._children: Counter[ChunkKey] = Counter()
        self._new: list[Entry] = []

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._parents

    def keys(self) -> list[ChunkKey]:
        return list(self._parents)

    def add(self, entry: Entry) -> None:
        """It is in the tier now. Those that come with one request are ordered together, by
        ``settle``, parents first; until then nobody asks them to go."""
        self._parents[entry.key] = entry.parent
        self._children[entry.parent] += 1
        self._new.append(entry)

    def settle(self) -> None:
        if self._new:
            self._policy.add(self._new)
            self._new = []

    def restore(self, entries: Sequence[Entry]) -> None:
        """These were found in the tier, those used longest ago first."""
        for entry in entries:
            self._parents[entry.key] = entry.parent
            self._children[entry.parent] += 1
        self._policy.restore(entries)

    def touch(self, path: Sequence[ChunkKey]) -> None:
        self._policy.touch(path)

    def remove(self, key: ChunkKey) -> None:
        """It is in the tier no more."""
        self.settle()
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
        """Who makes room next; None if nobody can."""
        for key in self._policy:
            if key not in self._children and not is_held(key):
                return key
        return None

    def last_to_go(self, limit: int) -> list[tuple[ChunkKey, int]]:
        """Those who leave last, the very last first, and how often each was used."""
        self.settle()
        return [(key, self._policy.uses(key)) for key in reversed(list(self._policy)[-limit:])]

    def check_integrity(self) -> list[str]:
        self.settle()
        here, held, ordered = set(self._parents), set(self.tier.keys()), set(self._policy)
        if here == held == ordered:
            return []
        return [
            f"{self.tier.name}: {len(here)} on the shelf, {len(held)} in the tier and "
            f"{len(ordered)} in order differ"
        ]
