"""A tier with an eviction order, and the thread that keeps such orders up to date."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from kvboost.cache.eviction.policy import Entry, EvictionPolicy
from kvboost.cache.tiers.base import Tier
from kvboost.tokens.hashing import ChunkKey

READ_AHEAD = 32
"""One of so many chunks of a tier is chosen for eviction at a time."""
MANY_NEWS = 32
"""With so much to tell a policy, a thread of its own does it."""
ORDER_SECONDS = 0.05
"""The rest of the thread after it has put chunks in order: requests come by the hundred each
second, and it takes the news of all at once."""
IDLE_SECONDS = 5.0
"""After so long without work, that thread ends."""


class OrderedTier:
    """The chunks of one tier, in the order in which they would be evicted. A chunk stays as long as
    a chunk that follows it is in the same tier. Not thread-safe, except ``settle``: the store holds
    its lock around every call.

    What is in the tier is always exact. The order lags: what happens is noted, and the policy hears
    of it in ``settle``, or when a chunk must leave and none is chosen yet. Chunks are chosen some
    at a time and leave in that order; those that are used or held meanwhile are passed over.
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy) -> None:
        self.tier = tier
        self._policy = policy
        self.parents: dict[ChunkKey, ChunkKey] = {}
        """The chunks that are here, for reading only."""
        self._children: Counter[ChunkKey] = Counter()
        self._new: dict[ChunkKey, Entry] = {}
        self._ordering = threading.Lock()  # guards the policy
        self._news: deque[tuple[Callable[..., None], Sequence[Any]]] = deque()
        """Calls of the policy that are still to be made."""
        self._used: set[ChunkKey] = set()
        """Chunks used since the policy was last asked which to evict."""
        self._chosen: tuple[list[ChunkKey], set[ChunkKey]] = [], self._used
        """The chunks to evict next, the first one last, and those used since they were chosen."""
        self._evicts = False

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def used_share(self) -> float:
        """The share of its budget that is taken."""
        return self.tier.nbytes / max(1, self.tier.max_bytes)

    @property
    def has_many_news(self) -> bool:
        """Whether it is time for ``settle``."""
        return len(self._news) >= MANY_NEWS

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.parents

    def add(self, entry: Entry) -> None:
        """A chunk was put into the tier. Chunks of the same request are ordered together by
        ``order_new``, parents first; until then all others are evicted before them."""
        self.parents[entry.key] = entry.parent
        self._children[entry.parent] += 1
        self._new[entry.key] = entry

    def order_new(self) -> None:
        """Orders the chunks that were added since the last call."""
        if self._new:
            self._note(self._policy.add, list(self._new.values()))
            self._are_used(self._new)
            self._new = {}

    def restore(self, entries: Sequence[Entry]) -> None:
        """These were found in the tier, those used longest ago first."""
        for entry in entries:
            self.parents[entry.key] = entry.parent
            self._children[entry.parent] += 1
        self._note(self._policy.restore, entries)

    def touch(self, *paths: Sequence[ChunkKey]) -> None:
        """A request used these paths, each from its first chunk on."""
        self._note(self._policy.touch, *paths)
        self._are_used(*paths)

    def remove(self, key: ChunkKey) -> None:
        """A chunk has left the tier. Unknown keys are ignored."""
        if key in self._new:
            self.order_new()
        parent = self.parents.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
            self._note(self._policy.remove, key)

    def clear(self) -> None:
        """Forgets what is in the tier."""
        for key in list(self.parents):
            self.remove(key)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for one more chunk of ``nbytes``."""
        return self.tier.nbytes + nbytes <= self.tier.max_bytes

    def next_to_go(self, is_held: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The chunk to evict next; None if there is none that may be evicted."""
        self._evicts = True
        for count in (0, self._ahead, len(self)):
            if count:
                with self._ordering:
                    self._choose(count)
            chosen, used = self._chosen
            while chosen:
                key = chosen.pop()
                is_here = key in self.parents and key not in self._children
                if is_here and key not in used and not is_held(key):
                    return key
        if not self._new:
            return None
        self.order_new()
        return self.next_to_go(is_held)

    def settle(self) -> None:
        """Brings the order up to date. Any thread may call this. It holds up the others only if
        they need the next chunk to evict and none is chosen, and not while a policy learns."""
        with self._ordering:
            self._tell()
            study = self._policy.study()
            if self._evicts and 2 * len(self._chosen[0]) < self._ahead:
                self._choose(self._ahead)
        if study is not None:
            learned = study()
            with self._ordering:
                learned()

    def last_to_go(self, limit: int) -> list[tuple[ChunkKey, int]]:
        """The chunks that would be evicted last, the very last first, and how often each was
        used."""
        self.order_new()
        with self._ordering:
            self._tell()
            return [(key, self._policy.uses(key)) for key in reversed(list(self._policy)[-limit:])]

    def check_integrity(self) -> list[str]:
        self.order_new()
        with self._ordering:
            self._tell()
            here, held, ordered = set(self.parents), set(self.tier.keys()), set(self._policy)
        if here == held == ordered:
            return []
        return [
            f"{self.tier.name}: {len(here)} known, {len(held)} in the tier and "
            f"{len(ordered)} in the eviction order differ"
        ]

    @property
    def _ahead(self) -> int:
        """The number of chunks that are chosen at a time. In a small tier it is one: the order is
        exact."""
        return 1 + len(self) // READ_AHEAD

    def _note(self, call: Callable[..., None], *arguments: Any) -> None:
        self._news.append((call, arguments))

    def _are_used(self, *paths: Iterable[ChunkKey]) -> None:
        self._used.update(*paths)
        self._chosen[1].update(*paths)

    def _tell(self) -> None:
        """Makes the calls that are noted."""
        while self._news:
            call, arguments = self._news.popleft()
            call(*arguments)

    def _choose(self, count: int) -> None:
        """Chooses the ``count`` chunks that leave next."""
        used: set[ChunkKey] = set()
        self._used = used  # before what was noted is told: nothing falls between
        self._tell()
        self._chosen = [*islice(self._policy, count)][::-1], used


class Aside:
    """Does some work in a thread of its own when it is asked to. Asked again meanwhile, it does it
    once more. Thread-safe."""

    def __init__(self, work: Callable[[], None], name: str, pause: float = 0.0) -> None:
        """``name``: of the thread. ``pause``: the least seconds between two times."""
        self._work = work
        self._name = name
        self._pause = pause
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def ask(self) -> None:
        self._asked.set()
        if self._thread is None or not self._thread.is_alive():
            with self._starting:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while self._asked.wait(IDLE_SECONDS):
            self._asked.clear()
            self._work()
            time.sleep(self._pause)
