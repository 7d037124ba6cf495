"""Moving chunks between memory and the slow tiers: the folder and the remote store.

Chunks are written in the background (``writer.py``) and read ahead of the request that needs them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.codec import Expected
from kvboost.cache.mixed import AnyFormat
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.remote.tier import Listing
from kvboost.cache.tiers.residency import Residency
from kvboost.cache.tiers.stats import RemoteStats
from kvboost.cache.tiers.writer import Writer
from kvboost.tokens.hashing import ChunkKey

FETCHED_AHEAD = 4
"""Chunks that are read from slow tiers while earlier ones are copied into place."""
ENTERED_AT_ONCE = 64
"""Chunks found on disk that are entered while the lock is held: some milliseconds."""
LEAST_WAITING = 64 * 1024**2
"""Bytes that may wait to be written after RAM has evicted them, at least."""

Coming = Future["KVChunk | None"]


class Transfers:
    """Call no method with ``lock``, the store's, held: files are read, written and removed and the
    network is waited for without it. The lock is taken for what ``residency`` must be told.

    A chunk from a slow tier is used only if it is what the plan said and has the model's
    ``format``; None leaves the format unchecked.
    """

    def __init__(
        self,
        tiers: Tiers,
        residency: Residency,
        lock: threading.RLock,
        format: AnyFormat | None = None,
    ) -> None:
        self._residency = residency
        self._lock = lock
        self._format = format
        self._tiers = tiers
        self.disk, self.remote = tiers.disk, tiers.remote
        self._ram = tiers.ram
        self.writer: Writer | None = None
        self._fetcher: ThreadPoolExecutor | None = None
        self._unremoved: list[ChunkKey] = []  # files of chunks that were to be purged
        self._refreshing = threading.Lock()  # taken before the store's lock
        if tiers.disk or tiers.remote:
            self.writer = residency.writer = Writer(
                self._write,
                self._written,
                max_waiting=max(LEAST_WAITING, tiers.ram.max_bytes // 4),
                max_pending=tiers.ram.max_bytes // 2,
            )
            self._fetcher = ThreadPoolExecutor(FETCHED_AHEAD, "kvboost-fetch")

    def open(self) -> None:
        """Finds what is on disk, and evicts some of it if it exceeds the budget."""
        if self.disk is not None:
            self.refresh(now=True)
            with self.disk.exclusive() as locked:
                if locked:
                    self._make_room_on_disk(0, self.disk)

    def adopt(self, chunks: Sequence[KVChunk]) -> list[KVChunk]:
        """New chunks where they are kept: on a GPU that has a tier, or in host memory."""
        return list(chunks) if self._tiers.gpu is not None else self._ram.adopt(chunks)

    def fetch(self, planned: Sequence[ChunkInfo]) -> Iterator[KVChunk | None]:
        """The planned chunks, in order; None for one that is lost or is not what was planned.
        Slow tiers are read ahead while the caller works on earlier chunks. The chunks must be
        held."""
        at_hand = self.at_hand(planned)
        if at_hand is not None:
            yield from at_hand
            return
        rest = iter(planned)
        coming = deque((info, self._begin(info)) for info in islice(rest, FETCHED_AHEAD))
        while coming:
            info, first = coming.popleft()
            chunk = first.result() if isinstance(first, Future) else first
            if chunk is not None and not self._tiers.shards.is_complete(chunk):
                chunk = None
            coming.extend((info, self._begin(info)) for info in islice(rest, 1))
            with self._lock:
                if chunk is None:
                    self._residency.mark_lost(info.key)
                else:
                    chunk = self._residency.put_on_gpu(chunk) or chunk
            yield chunk
        with self._lock:
            self._residency.order_new()

    def refresh(self, *, now: bool = False) -> None:
        """Notices what other processes have written or removed. With ``now``, all that was in the
        folder is entered when this returns. Without, a look that another thread has begun is left
        to it."""
        if self.disk is None or not self._refreshing.acquire(blocking=now):
            return
        try:
            changes = self.disk.refresh(now=now)
            for start in range(0, len(changes.added), ENTERED_AT_ONCE):
                with self._lock:
                    self._residency.add_found(changes.added[start : start + ENTERED_AT_ONCE])
            if changes.gone:
                with self._lock:
                    self._residency.remove_gone(changes.gone)
        finally:
            self._refreshing.release()

    def list_remote(self) -> Listing:
        """Everything the remote store has. Slow."""
        return self.remote.list_chunks() if self.remote is not None else Listing()

    def remote_stats(self) -> RemoteStats | None:
        return self.remote.stats() if self.remote is not None else None

    def remove_files(self, keys: Sequence[ChunkKey]) -> None:
        """Removes the files of chunks that were dropped. One that was stored again meanwhile stays
        in memory."""
        if self.disk is None:
            return
        for key in keys:
            self.disk.delete(key)
        gone = [key for key in keys if not self.disk.contains(key)]
        with self._lock:
            self._residency.remove_gone(gone)

    def purge(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """Removes ``keys`` from every slow tier, files that could not be removed by an earlier
        call, and what nobody here can read (quarantine and other versions' chunks); returns how
        many are left, by tier. One call at a time."""
        left: Counter[str] = Counter()
        if self.disk is not None:
            self.disk.clear_quarantine()
            self.disk.remove_others()
            wanted_gone = list(dict.fromkeys([*self._unremoved, *keys]))
            self.remove_files(wanted_gone)
            self._unremoved = list(filter(self.disk.contains, self._unwanted(wanted_gone)))
            left["disk"] = len(self._unremoved) + len(self.disk.others())
        if self.remote is not None:
            for key in keys:
                self.remote.delete(key)
            there = self.remote.count(self._unwanted(keys))
            left["remote"] = len(keys) if there is None else there  # unknown counts as left
        return dict(+left)

    def _unwanted(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those that no request has stored again."""
        with self._lock:
            return [key for key in keys if not self._residency.owner.is_wanted(key)]

    def await_writing(self) -> None:
        """Returns when the current write has ended; if its chunk was forgotten meanwhile, the file
        is removed again by then."""
        if self.writer is not None:
            self.writer.await_writing()

    def flush(self) -> None:
        """Writes what is pending."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Writes what is pending and releases everything."""
        if self.writer is not None:
            self.writer.close()
        if self._fetcher is not None:
            self._fetcher.shutdown()
        with self._lock:
            self._residency.clear()
        for tier in (self._tiers.gpu, self._ram, self.disk, self.remote):
            if tier is not None:
                tier.close()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No process writes to the folder meanwhile."""
        with self.disk.exclusive() if self.disk is not None else nullcontext():
            yield

    # Reading.

    def at_hand(self, planned: Sequence[ChunkInfo]) -> list[KVChunk] | None:
        """The planned chunks, if all are in the fastest tier; None otherwise."""
        with self._lock:
            chunks = self._residency.at_hand([info.key for info in planned])
        if chunks is None:
            return None
        for chunk, info in zip(chunks, planned, strict=True):
            if not chunk.info.is_as_planned(info) or not self._tiers.shards.is_complete(chunk):
                return None
        with self._lock:
            self._residency.hits[self._residency.fastest] += len(chunks)
        return chunks

    def _begin(self, planned: ChunkInfo) -> Coming | KVChunk | None:
        """The chunk if it is in memory, otherwise a future that will provide it."""
        with self._lock:
            tier = self._residency.where(planned.key)
            chunk = self._residency.ready(planned.key)
            if chunk is not None and chunk.info.is_as_planned(planned):
                self._residency.hits[tier or "ram"] += 1
                return chunk
        if self._fetcher is None:
            return None
        try:
            return self._fetcher.submit(self._load, planned)
        except RuntimeError:  # closed meanwhile
            return None

    def _load(self, planned: ChunkInfo) -> KVChunk | None:
        """Reads a chunk from a slow tier and promotes it to RAM; None if that fails."""
        try:
            chunk, tier = self._read(planned)
            if chunk is not None:
                chunk = self._tiers.shards.split(chunk)
            with self._lock:
                if chunk is None:
                    self._residency.mark_lost(planned.key)
                elif self._residency.promote(chunk, tier):
                    return chunk
        except Exception:  # no error in here may reach a request
            with self._lock:
                self._residency.counts["failed"] += 1
        return None

    def _read(self, planned: ChunkInfo) -> tuple[KVChunk | None, str]:
        """The chunk and the tier it came from."""
        key, expected = planned.key, Expected(planned, self._format)
        if self.disk is not None and self.disk.contains(key):
            chunk = self.disk.get(key, expected)
            if chunk is not None:
                return chunk, "disk"
        if self.remote is not None:
            chunk = self.remote.get(key, expected)
            if chunk is not None:
                return replace(chunk, data=chunk.data.map(self._ram.own)), "remote"
        return None, ""

    # Writing.

    def _write(self, chunk: KVChunk) -> bool:
        """Called by the writer's thread; returns whether ``chunk`` is finished."""
        (in_ram,) = self._ram.adopt([chunk])
        self._ram.settle()
        if in_ram is not chunk:
            with self._lock:
                self._residency.keep_in_ram(in_ram)
        whole = self._tiers.shards.join(in_ram)
        if whole is None:
            return True
        done = self.disk is None or self._write_to_disk(whole, self.disk)
        if self.remote is not None:
            self.remote.put(whole)
        return done

    def _written(self, key: ChunkKey) -> None:
        """Called by the writer's thread: ``key`` is no longer pending."""
        with self._lock:
            self._residency.forget_if_nowhere(key)

    def _write_to_disk(self, chunk: KVChunk, disk: DiskTier) -> bool:
        with disk.exclusive() as locked:
            if not locked:
                return False
            self.refresh(now=True)
            room = disk.room_for(chunk)
            if disk.is_blocked(chunk.key) or not self._make_room_on_disk(room, disk):
                with self._lock:
                    self._residency.counts["rejected"] += 1
                return True
            if not disk.put(chunk):
                return False
            with self._lock:
                is_wanted = self._residency.add_written(chunk.info)
            if not is_wanted:
                disk.delete(chunk.key)
        return True

    def _make_room_on_disk(self, nbytes: int, disk: DiskTier) -> bool:
        """No other process may write meanwhile."""
        disk.drop_unread(nbytes)
        while nbytes <= disk.max_bytes:
            with self._lock:
                if self._residency.fits_on_disk(nbytes):
                    return True
                key = self._residency.evict_from_disk()
            if key is None:
                return False
            disk.delete(key)
            if disk.contains(key):  # it cannot be removed, so it is still there
                if (info := disk.info(key)) is not None:
                    with self._lock:
                        self._residency.add_found([info])
                return False
        return False
