"""Tiers under one roof: what lies where, what comes up, what goes down.

New chunks come into memory, and are written to the slower tiers behind the requests' backs
(``writer.py``). A hit brings a chunk up, a full tier lets one go: to where it lies as well, or for
good. Every tier's budget holds at every moment, since room is made before anything comes in.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.eviction.policy import Entry, EvictionPolicy, recompute_cost
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ordered import OrderedTier
from kvboost.cache.tiers.writer import Writer
from kvboost.tokens.hashing import ChunkKey

FETCHED_AHEAD = 4
"""Chunks that are read from slow tiers while earlier ones are put in place."""
LEAST_WAITING = 64 * 1024**2
"""Bytes that may wait for being written when memory has let them go, at least."""


class Owner(Protocol):
    """Who knows the chunks. Called with the lock held."""

    def is_held(self, key: ChunkKey) -> bool:
        """Whether it must stay where it is."""

    def is_wanted(self, key: ChunkKey) -> bool:
        """Whether it is known, and not forgotten meanwhile."""

    def found(self, info: ChunkInfo) -> None:
        """Another process has written a chunk."""

    def described(self, info: ChunkInfo) -> None:
        """More is known of a chunk now."""

    def gone(self, key: ChunkKey) -> None:
        """A chunk has left the last tier."""


class Hierarchy:
    """``lock`` is the owner's: methods say when it must be held. No file is read, written or
    removed and no network waited for with it."""

    def __init__(
        self,
        tiers: Tiers,
        owner: Owner,
        lock: threading.RLock,
        *,
        policy: Callable[[], EvictionPolicy],
        max_chunks: int | None = None,
        attention_share: float = 0.0,
    ) -> None:
        self._owner = owner
        self._lock = lock
        self._attention_share = attention_share
        self._disk, self._remote = tiers.disk, tiers.remote
        self._ram, self._gpu = tiers.ram, tiers.gpu
        self._ram_shelf = OrderedTier(tiers.ram, policy(), max_chunks)
        self._gpu_shelf = OrderedTier(tiers.gpu, policy()) if tiers.gpu else None
        self._disk_shelf = OrderedTier(tiers.disk, policy()) if tiers.disk else None
        self._far: set[ChunkKey] = set()
        self._usual_norm = 0.0
        self._counts: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._writer: Writer | None = None
        self._fetcher: ThreadPoolExecutor | None = None
        if tiers.disk or tiers.remote:
            self._writer = Writer(
                self._write,
                self._written,
                max_waiting=max(LEAST_WAITING, tiers.ram.max_bytes // 4),
                max_owed=tiers.ram.max_bytes // 2,
            )
            self._fetcher = ThreadPoolExecutor(FETCHED_AHEAD, "kvboost-fetch")

    def open(self) -> None:
        """Finds what is on disk, and lets some of it go if that is too much."""
        if self._disk is not None:
            self.refresh(now=True)
            with self._disk.exclusive() as locked:
                if locked:
                    self._make_room_on_disk(0)

    def where(self, key: ChunkKey) -> str | None:
        """The fastest tier ``key`` lies in. The lock must be held."""
        if self._gpu_shelf is not None and key in self._gpu_shelf:
            return "gpu"
        if key in self._ram_shelf or (self._writer is not None and self._writer.owes(key)):
            return "ram"
        if self._disk_shelf is not None and key in self._disk_shelf:
            return "disk"
        return "remote" if key in self._far else None

    def ready(self, key: ChunkKey) -> KVChunk | None:
        """``key`` if it lies in memory. The lock must be held."""
        chunk = self._gpu.get(key) if self._gpu is not None else None
        chunk = chunk or self._ram.get(key)
        if chunk is None and self._writer is not None:
            chunk = self._writer.get(key)
        return chunk

    def adopt(self, chunk: KVChunk) -> KVChunk:
        """A copy of a new chunk in host memory, unless it lies there. Needs no lock."""
        return self._ram.adopt(chunk)

    def put(self, chunk: KVChunk, on_device: KVChunk) -> bool:
        """Takes a new chunk in, as it is in host memory and where it was computed; false if there
        is no room. Where memory is full of what is held it goes to the slow tiers at once. The
        lock must be held."""
        in_ram = self._put_in_ram(chunk)
        if self._writer is None and not in_ram:
            return False
        if self._writer is not None and not self._writer.owe(chunk, leaving=not in_ram):
            return False
        if self._gpu is not None:
            self._put_on_gpu(on_device)
        return True

    def settle(self) -> None:
        """One request's chunks are in: they are ordered. The lock must be held."""
        for shelf in self._shelves():
            shelf.settle()

    def touch(self, path: Sequence[ChunkKey]) -> None:
        """A request uses this path. The lock must be held."""
        for shelf in self._shelves():
            shelf.touch(path)
        if self._writer is not None:
            self._writer.touch(path)

    def fetch(self, keys: Sequence[ChunkKey]) -> Iterator[KVChunk | None]:
        """The chunks, in order; None for one that is lost. What lies far is read ahead while the
        caller is busy with what it has. They must be held; the lock must not."""
        rest = iter(keys)
        coming = deque((key, self._begin(key)) for key in islice(rest, FETCHED_AHEAD))
        while coming:
            key, first = coming.popleft()
            chunk = first.result() if isinstance(first, Future) else first
            coming.extend((key, self._begin(key)) for key in islice(rest, 1))
            with self._lock:
                if chunk is None:
                    self.lose(key)
                elif self._gpu is not None:
                    chunk = self._put_on_gpu(chunk)
            yield chunk
        with self._lock:
            self.settle()

    def remember(self, keys: Iterable[ChunkKey]) -> None:
        """The remote store has these. The lock must be held."""
        self._far.update(keys)

    def forget_far(self, keys: Iterable[ChunkKey]) -> None:
        """What was found in the remote store alone, and not fetched, is not held on to. The lock
        must be held."""
        for key in self._far.intersection(keys):
            if not self._owner.is_held(key):
                self._far.discard(key)
                if self.where(key) is None:
                    self._owner.gone(key)

    @property
    def asks_remote(self) -> bool:
        return self._remote is not None

    def remote_infos(self) -> Iterator[ChunkInfo]:
        """Everything the remote store has. Slow; the lock must not be held."""
        return self._remote.infos() if self._remote is not None else iter(())

    def purge(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """Removes what there still is of ``keys`` in slow tiers, quarantine included; returns how
        many are left, by tier. The lock must not be held."""
        left: Counter[str] = Counter()
        if self._disk is not None:
            self._disk.clear_quarantine()
            for key in keys:
                self._disk.delete(key)
            left["disk"] = sum(self._disk.contains(key) for key in keys)
        if self._remote is not None:
            before = sum(self._remote.faults.values())
            for key in keys:
                self._remote.delete(key)
            there = self._remote.contains_many(keys)
            asked = self._remote.state == "closed" and sum(self._remote.faults.values()) == before
            left["remote"] = sum(there) if asked else len(keys)  # or else nobody can say
        return dict(+left)

    def in_remote(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether the remote store has ``keys``. The lock must not be held."""
        return self._remote.contains_many(keys) if self._remote is not None and keys else []

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Takes chunks off every shelf, and out of memory. The lock must be held. Files are left
        for ``unlink``; what is being written just now may land: see ``await_writing``."""
        for key in keys:
            if self._writer is not None:
                self._writer.cancel(key)
            self._far.discard(key)
            for shelf in self._shelves():
                if key in shelf:
                    shelf.remove(key)
                    if shelf is not self._disk_shelf:
                        shelf.tier.delete(key)

    def unlink(self, keys: Sequence[ChunkKey]) -> None:
        """Removes the files of chunks that were dropped. The lock must not be held."""
        if self._disk is not None:
            for key in keys:
                self._disk.delete(key)

    def lose(self, key: ChunkKey) -> None:
        """``key`` was found, and cannot be had from any tier now. A file of it that may be whole
        stays, and is found again later. The lock must be held."""
        if self._owner.is_wanted(key):
            self.drop([key])
            self._owner.gone(key)
            self._counts["lost"] += 1

    def await_writing(self) -> None:
        """Returns when what is being written now has landed; what is not wanted any more is gone
        again then. The lock must not be held."""
        if self._writer is not None:
            self._writer.await_writing()

    def refresh(self, *, now: bool = False) -> None:
        """Notices what other processes have written. The lock must not be held."""
        if self._disk is None or self._disk_shelf is None:
            return
        changes = self._disk.refresh(now=now)
        if not changes.added and not changes.gone:
            return
        with self._lock:
            found = [info for info in changes.added if info.key not in self._disk_shelf]
            self._disk_shelf.restore([self._entry(info) for info in found])
            for info in found:
                self._owner.found(info)
            for key in changes.gone:
                self._disk_shelf.remove(key)
                self._leave(key)

    def flush(self) -> None:
        """Writes what is owed. The lock must not be held."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is owed and lets go of everything. The lock must not be held."""
        if self._writer is not None:
            self._writer.close()
        if self._fetcher is not None:
            self._fetcher.shutdown()
        with self._lock:
            for shelf in self._shelves():
                shelf.clear()
        for tier in (self._gpu, self._ram, self._disk, self._remote):
            if tier is not None:
                tier.close()

    def remote_stats(self) -> dict[str, Any]:
        """The lock must not be held."""
        return self._remote.stats() if self._remote is not None else {}

    def stats(self, remote: dict[str, Any]) -> dict[str, Any]:
        """With what ``remote_stats`` says. The lock must be held."""
        tiers: dict[str, dict[str, Any]] = {}
        for shelf in self._shelves():
            tier = shelf.tier
            tiers[tier.name] = {
                "chunks": len(shelf),
                "bytes": tier.nbytes,
                "max_bytes": tier.max_bytes,
                "hits": self._hits[tier.name],
                "faults": tier.faults,
            }
        if self._remote is not None:
            tiers["remote"] = {**remote, "hits": self._hits["remote"]}
        if self._writer is not None:
            tiers["writing"] = self._writer.stats()
        names = ("evicted", "demoted", "promoted", "unwritten", "rejected", "failed", "lost")
        return {"tiers": tiers, **{name: self._counts[name] for name in names}}

    def in_memory(self) -> set[ChunkKey]:
        """What lies in GPU or RAM. The lock must be held."""
        return {*self._ram.keys(), *(self._gpu.keys() if self._gpu is not None else ())}

    def last_to_go(self, limit: int) -> list[tuple[ChunkKey, int]]:
        """The chunks in RAM that would be evicted last, the very last first, and how often each
        was used. The lock must be held."""
        return self._ram_shelf.last_to_go(limit)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is written to disk meanwhile. To be entered before the lock."""
        with self._disk.exclusive() if self._disk is not None else nullcontext():
            yield

    def check_integrity(self) -> list[str]:
        """The lock must be held, and the disk quiet."""
        problems = [problem for shelf in self._shelves() for problem in shelf.check_integrity()]
        for tier in (self._ram, self._gpu):
            if tier is None:
                continue
            chunks = [tier.get(info.key) for info in tier.infos()]
            nbytes = sum(chunk.data.nbytes for chunk in chunks if chunk is not None)
            if nbytes != tier.nbytes or nbytes > tier.max_bytes:
                problems.append(f"{tier.name} says {tier.nbytes} bytes but holds {nbytes}")
        if self._disk is not None and self._disk.nbytes > self._disk.max_bytes:
            problems.append(f"disk holds {self._disk.nbytes} bytes of {self._disk.max_bytes}")
        return problems

    def _shelves(self) -> Iterator[OrderedTier]:
        for shelf in (self._gpu_shelf, self._ram_shelf, self._disk_shelf):
            if shelf is not None:
                yield shelf

    def _entry(self, info: ChunkInfo) -> Entry:
        cost = recompute_cost(info.base_position, info.num_tokens, self._attention_share)
        # Keys of small norm are attended to more (Devoto et al. 2024): half the usual norm, twice
        # as important.
        importance = 1.0
        if info.key_norm:
            self._usual_norm += (
                0.05 * (info.key_norm - self._usual_norm) if self._usual_norm else info.key_norm
            )
            importance = self._usual_norm / info.key_norm
        return Entry(info.key, info.parent, info.nbytes, cost, importance)

    # Coming up.

    def _begin(self, key: ChunkKey) -> Future[KVChunk | None] | KVChunk | None:
        """The chunk if it lies in memory, otherwise what will give it."""
        with self._lock:
            tier = self.where(key)
            chunk = self.ready(key)
            if chunk is not None:
                self._hits[tier or "ram"] += 1
                return chunk
        if self._fetcher is None:
            return None
        try:
            return self._fetcher.submit(self._load, key)
        except RuntimeError:  # closed meanwhile
            return None

    def _load(self, key: ChunkKey) -> KVChunk | None:
        """Reads a chunk from the disk or from afar, and brings it into memory; None if anything
        stands in the way."""
        try:
            return self._bring_up(key)
        except Exception:  # nothing that goes wrong here may reach a request
            with self._lock:
                self._counts["failed"] += 1
            return None

    def _bring_up(self, key: ChunkKey) -> KVChunk | None:
        chunk, tier = None, "disk"
        if self._disk is not None and self._disk.contains(key):
            chunk = self._disk.get(key)
        if chunk is None and self._remote is not None:
            chunk, tier = self._remote.get(key), "remote"
            if chunk is not None:
                chunk = replace(chunk, data=chunk.data.map(self._ram.own))
        with self._lock:
            if chunk is None:
                self.lose(key)
            if chunk is None or not self._owner.is_wanted(key):
                return None
            self._hits[tier] += 1
            self._owner.described(chunk.info)
            if self._put_in_ram(chunk):
                self._far.discard(key)
                self._counts["promoted"] += 1
                if tier == "remote" and self._writer is not None and self._disk is not None:
                    self._writer.owe(chunk)
        return chunk

    def _put_in_ram(self, chunk: KVChunk) -> bool:
        if chunk.key in self._ram_shelf:
            return True
        if not self._make_room(self._ram_shelf, chunk.nbytes) or not self._ram.put(chunk):
            return False
        self._ram_shelf.add(self._entry(chunk.info))
        if self._writer is not None:
            self._writer.taken_back(chunk.key)
        return True

    def _put_on_gpu(self, chunk: KVChunk) -> KVChunk:
        """``chunk`` on the GPU, kept there if there is room; as it is otherwise."""
        assert self._gpu is not None and self._gpu_shelf is not None
        if chunk.key in self._gpu_shelf:
            return chunk
        if not self._make_room(self._gpu_shelf, chunk.nbytes):
            return chunk
        try:
            on_gpu = self._gpu.adopt(chunk)
        except RuntimeError:  # its memory is full of other things
            self._gpu.faults["full"] = self._gpu.faults.get("full", 0) + 1
            return chunk
        if self._gpu.put(on_gpu):
            self._gpu_shelf.add(self._entry(chunk.info))
        return on_gpu

    # Going down. The lock must be held, but for the disk.

    def _make_room(self, shelf: OrderedTier, nbytes: int) -> bool:
        if nbytes > shelf.tier.max_bytes:
            return False
        while not shelf.fits(nbytes):
            key = shelf.next_to_go(self._owner.is_held)
            if key is None:
                return False
            shelf.tier.delete(key)
            shelf.remove(key)
            self._leave(key)
        return True

    def _leave(self, key: ChunkKey) -> None:
        """``key`` has left a tier."""
        if self._writer is not None and key not in self._ram_shelf:
            owed = self._writer.owes(key)
            self._counts["unwritten"] += owed and not self._writer.let_go(key)
        if self.where(key) is None:
            self._counts["evicted"] += 1
            self._owner.gone(key)
        else:
            self._counts["demoted"] += 1

    def _write(self, chunk: KVChunk) -> bool:
        """Called by the writer's thread: whether ``chunk`` is done with."""
        done = self._disk is None or self._write_to_disk(chunk, self._disk)
        if self._remote is not None:
            self._remote.put(chunk)
        return done

    def _written(self, key: ChunkKey) -> None:
        """Called by the writer's thread: ``key`` is owed no more."""
        with self._lock:
            if self.where(key) is None:
                self._owner.gone(key)

    def _write_to_disk(self, chunk: KVChunk, disk: DiskTier) -> bool:
        assert self._disk_shelf is not None
        with disk.exclusive() as locked:
            if not locked:
                return False
            self.refresh(now=True)
            if not self._make_room_on_disk(disk.room_for(chunk)):
                self._counts["rejected"] += 1
                return True
            if not disk.put(chunk):
                return False
            with self._lock:
                if not self._owner.is_wanted(chunk.key):
                    disk.delete(chunk.key)
                elif chunk.key not in self._disk_shelf:
                    self._disk_shelf.add(self._entry(chunk.info))
                    self._disk_shelf.settle()
        return True

    def _make_room_on_disk(self, nbytes: int) -> bool:
        """No other process may write meanwhile."""
        disk, shelf = self._disk, self._disk_shelf
        assert disk is not None and shelf is not None
        disk.empty_quarantine(nbytes)
        while nbytes <= disk.max_bytes:
            with self._lock:
                if shelf.fits(nbytes):
                    return True
                key = shelf.next_to_go(self._owner.is_held)
            if key is None:
                return False
            disk.delete(key)
            if disk.contains(key):  # it cannot be removed
                return False
            with self._lock:
                shelf.remove(key)
                self._leave(key)
        return False
