"""Delayed writing: chunks are written to slower tiers while no request waits for them.

A chunk is pending from its admission until it is written. It is written when it has become cold (a
conversation's last chunk is replaced by a longer one every few seconds and need not be written each
time), when much is pending, when RAM evicts it, or at the end.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvboost.cache.chunk import KVChunk
from kvboost.cache.tiers.stats import WriterStats
from kvboost.tokens.hashing import ChunkKey

COLD_SECONDS = 1.0
LONGEST_PAUSE = 30.0
MOST_FAILURES = 3


@dataclass
class _Pending:
    chunk: KVChunk
    used: float
    tried: int = 0
    """The last flush that tried to write it."""
    evicted: bool = False
    """RAM has evicted it: the writer holds the only copy."""


class Writer:
    """Thread-safe. A thread of the writer, started with the first chunk, calls ``write``, which
    returns whether the chunk is finished; if not, it is tried again later. ``written`` is called
    when a chunk is no longer pending. The writer holds at most ``max_waiting`` bytes that RAM has
    evicted, and waits for chunks to become cold only while no more than ``max_pending`` bytes are
    pending."""

    def __init__(
        self,
        write: Callable[[KVChunk], bool],
        written: Callable[[ChunkKey], None],
        *,
        max_waiting: int,
        max_pending: int,
    ) -> None:
        self.write = write
        self._written = written
        self._max_waiting = max_waiting
        self._max_pending = max_pending
        self._pending: OrderedDict[ChunkKey, _Pending] = OrderedDict()  # the coldest first
        self._nbytes = 0
        self._waiting_bytes = 0
        self._busy: ChunkKey | None = None
        self._flush = 0  # which one it is, and which one is over
        self._flushed = 0
        self._failures = 0  # in a row
        self._pause = 0.0
        self._not_before = 0.0
        self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def stats(self) -> WriterStats:
        with self._changed:
            return WriterStats(len(self._pending), self._waiting_bytes, self._max_waiting)

    def enqueue(self, chunk: KVChunk, *, evicted: bool = False) -> bool:
        """``chunk`` is to be written; at once if RAM has ``evicted`` it or has no room for it.
        False if that would be too much to hold."""
        with self._changed:
            if self._closed:
                return not evicted
            if chunk.key not in self._pending:
                self._pending[chunk.key] = _Pending(chunk, time.monotonic())
                self._nbytes += chunk.nbytes
                self._start()
                self._changed.notify_all()
            return not evicted or self.evicted(chunk.key)

    def replace(self, chunk: KVChunk) -> None:
        """``chunk`` is written instead of the same one in other memory, if that is pending."""
        with self._changed:
            if (pending := self._pending.get(chunk.key)) is not None:
                pending.chunk = chunk

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These were used: they are not cold."""
        with self._changed:
            for key in keys:
                if (pending := self._pending.get(key)) is not None:
                    pending.used = time.monotonic()
                    self._pending.move_to_end(key)

    def evicted(self, key: ChunkKey) -> bool:
        """RAM evicts ``key``: true if the writer holds it until it is written. False if it is not
        pending, or if it is too much to hold: then it is no longer pending."""
        with self._changed:
            pending = self._pending.get(key)
            if pending is None or pending.evicted:
                return pending is not None
            if self._waiting_bytes + pending.chunk.nbytes > self._max_waiting:
                self._discard(key)
                return False
            pending.evicted = True
            self._waiting_bytes += pending.chunk.nbytes
            self._pending.move_to_end(key, last=False)
            self._changed.notify_all()
            return True

    def back_in_ram(self, key: ChunkKey) -> None:
        """``key`` is in RAM again."""
        with self._changed:
            pending = self._pending.get(key)
            if pending is not None and pending.evicted:
                pending.evicted = False
                self._waiting_bytes -= pending.chunk.nbytes

    def get(self, key: ChunkKey) -> KVChunk | None:
        with self._changed:
            pending = self._pending.get(key)
            return pending.chunk if pending else None

    def is_pending(self, key: ChunkKey) -> bool:
        with self._changed:
            return key in self._pending

    def cancel(self, key: ChunkKey) -> None:
        """``key`` is no longer pending. A write may be under way: see ``await_writing``."""
        with self._changed:
            self._discard(key)

    def await_writing(self) -> None:
        """Returns when the current write is over. The caller must not hold a lock that ``write``
        needs."""
        with self._changed:
            busy = self._busy
            self._changed.wait_for(lambda: busy is None or self._busy != busy)

    def flush(self) -> None:
        """Returns when everything pending now was written, or tried. After ``MOST_FAILURES`` in a
        row it gives up on the rest."""
        if self._is_forked():
            return
        with self._changed:
            self._flush += 1
            number = self._flush
            self._failures = 0
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or not (self._pending or self._busy) or self._flushed >= number
            )

    def close(self) -> None:
        """Writes what is pending, as far as possible, and ends."""
        if self._is_forked():
            return
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            for key in list(self._pending):
                self._discard(key)

    def _is_forked(self) -> bool:
        """A forked process has no such thread, and the lock may be held there for ever."""
        return self._process != os.getpid()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvboost-write", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a process that ends without closing its engine

    def _work(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                done = self.write(chunk)
            except Exception:  # whatever it is, later chunks must still be written
                done = False
            with self._changed:
                if done:
                    self._discard(chunk.key)
                    self._failures, self._pause = 0, 0.0
                else:
                    self._postpone(chunk.key)
            if done:
                self._written(chunk.key)
            with self._changed:
                self._busy = None
                self._changed.notify_all()

    def _postpone(self, key: ChunkKey) -> None:
        """A chunk could not be written: it goes to the end, and the next write waits a while."""
        self._failures += 1
        self._pause = min(max(1.0, 2 * self._pause), LONGEST_PAUSE)
        self._not_before = time.monotonic() + self._pause
        if key in self._pending:
            self._pending.move_to_end(key)

    def _next(self) -> KVChunk | None:
        """The next chunk to write, once there is one; None when it is time to end."""
        with self._changed:
            while not self._closed:
                if (key := self._to_flush()) is not None:
                    self._busy = key
                    self._pending[key].tried = self._flush
                    return self._pending[key].chunk
                rest = self._due() - time.monotonic() if self._pending else None
                if rest is not None and rest <= 0:
                    self._busy = self._ancestor(next(iter(self._pending)))
                    return self._pending[self._busy].chunk
                self._changed.wait(rest)
            return None

    def _to_flush(self) -> ChunkKey | None:
        """A chunk that the current flush has not tried yet; None ends the flush."""
        if self._flushed < self._flush:
            if self._failures < MOST_FAILURES:
                for key, pending in self._pending.items():
                    if pending.tried < self._flush:
                        ancestor = self._ancestor(key)
                        return ancestor if self._pending[ancestor].tried < self._flush else key
            self._flushed = self._flush
            self._changed.notify_all()
        return None

    def _due(self) -> float:
        """When the next chunk is to be written."""
        coldest = next(iter(self._pending.values()))
        if coldest.evicted or self._nbytes > self._max_pending:
            return self._not_before
        return max(self._not_before, coldest.used + COLD_SECONDS)

    def _ancestor(self, key: ChunkKey) -> ChunkKey:
        """The first pending chunk before ``key``, which is to be written first; or ``key``."""
        info = self._pending[key].chunk.info
        while (parent := self._pending.get(info.parent)) is not None:
            if parent.chunk.info.base_position >= info.base_position:  # never in a circle
                break
            info = parent.chunk.info
        return info.key

    def _discard(self, key: ChunkKey) -> None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._nbytes -= pending.chunk.nbytes
            self._waiting_bytes -= pending.chunk.nbytes if pending.evicted else 0
