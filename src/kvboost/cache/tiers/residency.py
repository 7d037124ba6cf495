"""In which tiers each chunk is, and which chunk each tier evicts next.

New chunks stay where they were computed: on a GPU, or in RAM. A hit brings a chunk up; a full tier
evicts one. An exact chunk that leaves the GPU and is nowhere else goes to RAM; an approximate one,
which is as fast to make again, is gone. Room is made before anything is put in, so every budget
holds at every moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage
from kvboost.cache.eviction.policy import Entry, EvictionPolicy, recompute_cost
from kvboost.cache.states import rows_only
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ordered import ORDER_SECONDS, Aside, OrderedTier
from kvboost.cache.tiers.stats import MoveStats, TierStats
from kvboost.cache.tiers.writer import Writer
from kvboost.tokens.hashing import ChunkKey

EVICTED_TOGETHER = 32
"""Chunks that leave the GPU at a time, if requests need pages: one copy for all."""


class Owner(Protocol):
    """The store, which knows the chunks. Called with the lock held."""

    def is_held(self, key: ChunkKey) -> bool:
        """Whether it must stay where it is."""

    def is_wanted(self, key: ChunkKey) -> bool:
        """Whether it is known, and was not forgotten meanwhile."""

    def on_found(self, infos: Sequence[ChunkInfo]) -> None:
        """Chunks were found in the folder: at the start, or written by another process."""

    def on_described(self, info: ChunkInfo) -> None:
        """A chunk was read: its size and precision are known now."""

    def on_gone(self, key: ChunkKey, how: str = "evicted") -> None:
        """A chunk has left its last tier. ``how``: as explanations say it."""


class Residency:
    """Call every method with the store's lock held. No method reads, writes or removes a file or
    waits for a network: that is the work of :class:`kvboost.cache.tiers.transfers.Transfers`."""

    def __init__(
        self,
        tiers: Tiers,
        owner: Owner,
        *,
        policy: Callable[[], EvictionPolicy],
        attention_share: float = 0.0,
        state_every: int | None = None,
    ) -> None:
        """``state_every``: how many rows apart states are kept, of a model that has some."""
        self.owner = owner
        self.writer: Writer | None = None
        """Attached by the transfers if there is a slow tier."""
        self.counts: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self._attention_share = attention_share
        self._state_every = state_every
        self._ram, self._gpu = tiers.ram, tiers.gpu
        self._in_ram = OrderedTier(tiers.ram, policy())
        self._on_gpu = OrderedTier(tiers.gpu, policy()) if tiers.gpu else None
        self._on_disk = OrderedTier(tiers.disk, policy()) if tiers.disk else None
        self._in_remote: set[ChunkKey] = set()
        # A lookup asks for every chunk that it finds: no calls.
        self._keys_in_ram: Collection[ChunkKey] = self._in_ram.parents
        self._keys_on_gpu: Collection[ChunkKey] = ()
        if self._on_gpu is not None:
            self._keys_on_gpu = self._on_gpu.parents
        self._ordering = Aside(self.settle, "kvboost-order", ORDER_SECONDS)

    def where(self, key: ChunkKey) -> str | None:
        """The fastest tier that holds ``key``; None if no tier does."""
        if key in self._keys_on_gpu:
            return "gpu"
        if key in self._keys_in_ram or (self.writer is not None and self.writer.is_pending(key)):
            return "ram"
        if self._on_disk is not None and key in self._on_disk:
            return "disk"
        return "remote" if key in self._in_remote else None

    def ready(self, key: ChunkKey) -> KVChunk | None:
        """``key`` if it is in memory."""
        chunk = self._gpu.get(key) if self._gpu is not None else None
        chunk = chunk or self._ram.get(key)
        if chunk is None and self.writer is not None:
            chunk = self.writer.get(key)
            self._ram.settle()
        return chunk

    @property
    def fastest(self) -> str:
        """The name of the fastest tier."""
        return (self._gpu or self._ram).name

    @property
    def used_share(self) -> float:
        """The share of the memory that is taken: the host's, or a GPU's if that is fuller."""
        tiers = (self._in_ram, self._on_gpu)
        return max(tier.used_share for tier in tiers if tier is not None)

    def at_hand(self, keys: Sequence[ChunkKey]) -> list[KVChunk] | None:
        """The chunks of these keys, if all are in the fastest tier; None otherwise."""
        return (self._gpu or self._ram).get_all(keys)

    def make_room(self, nbytes: int) -> None:
        """Makes room for new chunks of so many bytes in all, if they fit. Each would make its own
        room, but what leaves between two of them has them ordered one by one."""
        self._make_room(self._in_ram if self._on_gpu is None else self._on_gpu, nbytes)

    def put(self, chunk: KVChunk) -> bool:
        """Takes a new chunk in: on the GPU, or in RAM if there is no such tier or no room in it.
        False if there is no room. If RAM is full of chunks in use, it goes to the slow tiers at
        once."""
        if self._gpu is not None:
            if self.put_on_gpu(chunk) is not None:
                return self.writer is None or self.writer.enqueue(chunk)
            (chunk,) = self._ram.adopt([chunk])
        in_ram = self.put_in_ram(chunk)
        if self.writer is None:
            return in_ram
        return self.writer.enqueue(chunk, evicted=not in_ram)

    def put_in_ram(self, chunk: KVChunk) -> bool:
        """False if there is no room."""
        if chunk.key in self._in_ram:
            return True
        if not self._make_room(self._in_ram, chunk.nbytes) or not self._ram.put(chunk):
            return False
        self._in_ram.add(self._entry(chunk.info))
        if self.writer is not None:
            self.writer.back_in_ram(chunk.key)
        return True

    def put_on_gpu(self, chunk: KVChunk) -> KVChunk | None:
        """``chunk`` on the GPU, kept there. None if there is no such tier, or no room in it."""
        if self._gpu is None or self._on_gpu is None:
            return None
        if chunk.key in self._on_gpu:
            return self._gpu.get(chunk.key)
        if not self._make_room(self._on_gpu, chunk.nbytes):
            return None
        while not self._gpu.has_pages_for(chunk) and self.free_gpu():
            pass
        try:
            (on_gpu,) = self._gpu.adopt([chunk])
        except (MemoryError, RuntimeError):  # its memory is full of other things
            self._gpu.faults["full"] = self._gpu.faults.get("full", 0) + 1
            return None
        if not self._gpu.put(on_gpu):
            return None
        self._on_gpu.add(self._entry(chunk.info))
        return on_gpu

    def free_gpu(self) -> bool:
        """Evicts some chunks from the GPU; False if none may go."""
        return self._on_gpu is not None and self._evict(self._on_gpu, EVICTED_TOGETHER)

    def keep_in_ram(self, chunk: KVChunk) -> None:
        """A copy of a chunk from the GPU is in host memory: it goes to RAM if there is room, and
        replaces the one that waits to be written."""
        if not self.owner.is_wanted(chunk.key):
            return
        if self.writer is not None:
            self.writer.replace(chunk)
        self.put_in_ram(chunk)

    def promote(self, chunk: KVChunk, tier: str) -> bool:
        """A chunk was read from ``tier`` and serves a request; it is put into RAM if there is
        room. False if it was forgotten meanwhile: then it must not serve."""
        if not self.owner.is_wanted(chunk.key):
            return False
        self.hits[tier] += 1
        self.owner.on_described(chunk.info)
        if self.put_in_ram(chunk):
            self._in_remote.discard(chunk.key)
            self.counts["promoted"] += 1
            if tier == "remote" and self.writer is not None and self._on_disk is not None:
                self.writer.enqueue(chunk)
        return True

    def order_new(self) -> None:
        """All chunks of a request are in: they get their places in the eviction order."""
        for tier in self._tiers():
            tier.order_new()
        self._settle_aside()
        if self._gpu is not None and not self._gpu.has_spare():
            self._gpu.on_low()

    def settle(self) -> None:
        """Brings the eviction orders up to date. Any thread may call this, without the lock."""
        for tier in self._tiers():
            tier.settle()

    def touch(self, *paths: Sequence[ChunkKey]) -> None:
        """A request uses these paths, each from its first chunk on."""
        for tier in self._tiers():
            tier.touch(*paths)
        self._settle_aside()
        if self.writer is not None:
            self.writer.touch(key for path in paths for key in path)

    def add_remote(self, keys: Iterable[ChunkKey]) -> None:
        """The remote store has these."""
        self._in_remote.update(keys)

    def drop_unfetched(self, keys: Iterable[ChunkKey]) -> None:
        """Forgets chunks that were found in the remote store and not fetched."""
        for key in self._in_remote.intersection(keys):
            if not self.owner.is_held(key):
                self._in_remote.discard(key)
                self.forget_if_nowhere(key)

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Takes chunks out of every tier in memory and out of the books. Their files are left to
        ``Transfers.remove_files``. A chunk that is being written now may still arrive on disk: see
        ``Transfers.await_writing``."""
        for key in keys:
            if self.writer is not None:
                self.writer.cancel(key)
            self._in_remote.discard(key)
            for tier in self._tiers():
                if key in tier:
                    tier.remove(key)
                    if tier is not self._on_disk:
                        tier.tier.delete(key)

    def drop_states(self, key: ChunkKey) -> ChunkInfo | None:
        """Drops the states of a chunk in memory, if it is there; returns what it is then."""
        smaller: ChunkInfo | None = None
        for tier in (self._gpu, self._ram):
            chunk = None if tier is None else tier.get(key)
            if tier is not None and chunk is not None:
                slim = rows_only(chunk)
                tier.delete(key)
                tier.put(slim)
                smaller = slim.info
        return smaller

    def leave_memory(self, infos: Iterable[ChunkInfo]) -> int:
        """Takes chunks that are not in use out of the tiers in memory; returns how many. What is
        on disk, or waits to be written there, stays. Chunks before one in use stay too."""
        last_first = sorted(infos, key=lambda info: info.base_position, reverse=True)
        needed: set[ChunkKey] = set()
        left = 0
        for info in last_first:
            if info.key in needed or self.owner.is_held(info.key):
                needed |= {info.parent, info.before}
                continue
            for tier in (self._on_gpu, self._in_ram):
                if tier is not None and info.key in tier:
                    tier.tier.delete(info.key)
                    tier.remove(info.key)
                    self._left(info.key)
                    left += 1
        return left

    def mark_lost(self, key: ChunkKey) -> None:
        """``key`` was found, but no tier can provide it now. If its file exists and is whole, it
        stays and is found again later."""
        if self.owner.is_wanted(key):
            self.drop([key])
            self.owner.on_gone(key, "lost")
            self.counts["lost"] += 1

    def forget_if_nowhere(self, key: ChunkKey) -> None:
        if self.where(key) is None:
            self.owner.on_gone(key)

    def add_found(self, infos: Iterable[ChunkInfo]) -> None:
        """These chunks are in the folder, those used longest ago first."""
        if self._on_disk is None:
            return
        found = [info for info in infos if info.key not in self._on_disk]
        self._on_disk.restore([self._entry(info) for info in found])
        self.owner.on_found(found)

    def add_written(self, info: ChunkInfo) -> bool:
        """A chunk was written to the folder. False if it was forgotten meanwhile: then its file
        must be removed again."""
        if self._on_disk is None or not self.owner.is_wanted(info.key):
            return False
        if info.key not in self._on_disk:
            self._on_disk.add(self._entry(info))
            self._on_disk.order_new()
        return True

    def remove_gone(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are not in the folder any more. Others than were known there are ignored."""
        for key in keys:
            if self._on_disk is not None and key in self._on_disk:
                self._on_disk.remove(key)
                self._left(key)

    def fits_on_disk(self, nbytes: int) -> bool:
        return self._on_disk is not None and self._on_disk.fits(nbytes)

    def evict_from_disk(self) -> ChunkKey | None:
        """The chunk that makes room in the folder next, taken out of the books before its file is
        removed: no lookup can plan it any more. None if there is none that may be evicted."""
        if self._on_disk is None:
            return None
        key = self._on_disk.next_to_go(self.owner.is_held)
        if key is not None:
            self._on_disk.remove(key)
            self._left(key)
        return key

    def clear(self) -> None:
        for tier in self._tiers():
            tier.clear()

    def in_memory(self) -> set[ChunkKey]:
        """The chunks that are on the GPU or in RAM."""
        return {*self._ram.keys(), *(self._gpu.keys() if self._gpu is not None else ())}

    def last_to_go(self, limit: int) -> list[tuple[ChunkKey, int]]:
        """The chunks of the fastest tier that would be evicted last, the very last first, and how
        often each was used."""
        tier = self._in_ram if self._on_gpu is None else self._on_gpu
        return tier.last_to_go(limit)

    def tier_stats(self) -> dict[str, TierStats]:
        return {
            tier.tier.name: TierStats(
                chunks=len(tier),
                nbytes=tier.tier.nbytes,
                max_bytes=tier.tier.max_bytes,
                hits=self.hits[tier.tier.name],
                faults=dict(tier.tier.faults),
            )
            for tier in self._tiers()
        }

    def filled(self) -> list[tuple[int, int]]:
        """The bytes and the chunks of each tier, for whoever asks often."""
        return [(tier.tier.nbytes, len(tier)) for tier in self._tiers()]

    def move_stats(self) -> MoveStats:
        return MoveStats(**self.counts)

    def check_integrity(self) -> list[str]:
        """No process may write to the folder meanwhile: see ``Transfers.quiet``."""
        problems = [problem for tier in self._tiers() for problem in tier.check_integrity()]
        for tier in (self._ram, self._gpu):
            if tier is None:
                continue
            chunks = map(tier.get, tier.keys())
            nbytes = sum(chunk.data.nbytes for chunk in chunks if chunk is not None)
            if nbytes != tier.nbytes or nbytes > tier.max_bytes:
                problems.append(f"{tier.name} says {tier.nbytes} bytes but holds {nbytes}")
        if self._on_disk is not None and not self._on_disk.fits(0):
            disk = self._on_disk.tier
            problems.append(f"disk holds {disk.nbytes} bytes of {disk.max_bytes}")
        return problems

    def _tiers(self) -> Iterator[OrderedTier]:
        for tier in (self._on_gpu, self._in_ram, self._on_disk):
            if tier is not None:
                yield tier

    def _settle_aside(self) -> None:
        if any(tier.has_many_news for tier in self._tiers()):
            self._ordering.ask()

    def _make_room(self, tier: OrderedTier, nbytes: int) -> bool:
        """For a tier in memory."""
        if nbytes > tier.tier.max_bytes:
            return False
        while not tier.fits(nbytes):
            if not self._evict(tier):
                return False
        return True

    def _evict(self, tier: OrderedTier, number: int = 1) -> bool:
        """Evicts the next chunks of a tier in memory, at most ``number``; False if none may go."""
        leaving: list[tuple[ChunkKey, KVChunk | None]] = []
        while len(leaving) < number:
            key = tier.next_to_go(self.owner.is_held)
            if key is None:
                break
            leaving.append((key, tier.tier.get(key) if tier is self._on_gpu else None))
            tier.tier.delete(key)
            tier.remove(key)
        if tier is self._on_gpu:
            self._save([chunk for _, chunk in leaving if chunk is not None])
        for key, _ in leaving:
            self._left(key)
        return bool(leaving)

    def _save(self, chunks: Sequence[KVChunk]) -> None:
        """Copies chunks that leave the GPU to RAM, except those that another tier has, and those
        that are easily made again. A copy that has begun reads the rows before anything that the
        GPU is told later."""
        if only_here := [chunk for chunk in chunks if self._must_save(chunk)]:
            with suppress(MemoryError, RuntimeError):  # without memory for copies they are lost
                for chunk in self._ram.adopt(only_here):
                    self.keep_in_ram(chunk)

    def _must_save(self, chunk: KVChunk) -> bool:
        if self.writer is not None and self.writer.is_pending(chunk.key):
            return True  # until it is written, its pages cannot be given to others
        if chunk.info.lineage is Lineage.APPROXIMATE:
            return False  # moving its text again takes no longer than bringing it back
        on_disk = () if self._on_disk is None else self._on_disk.parents
        places = (self._in_ram.parents, on_disk, self._in_remote)
        return not any(chunk.key in place for place in places)

    def _left(self, key: ChunkKey) -> None:
        """``key`` has left a tier."""
        if self.writer is not None and key not in self._in_ram:
            pending = self.writer.is_pending(key)
            self.counts["unwritten"] += pending and not self.writer.evicted(key)
        if self.where(key) is None:
            self.counts["evicted"] += 1
            self.owner.on_gone(key)
        else:
            self.counts["demoted"] += 1

    def _entry(self, info: ChunkInfo) -> Entry:
        position, num_tokens = info.base_position, info.num_tokens
        if info.has_state and self._state_every is not None:
            # Without it, a prompt goes on from an earlier state: so many rows are computed again.
            num_tokens = min(info.end, max(self._state_every, num_tokens))
            position = info.end - num_tokens
        cost = recompute_cost(position, num_tokens, self._attention_share)
        return Entry(info.key, info.parent, info.nbytes, cost)
