"""Write-behind: chunks reach slower tiers when nobody waits for them.

A chunk is owed from its admission until it is written. It is written when it has become cold (a
conversation's last chunk is replaced by a longer one every few seconds, and need not be written
each time), when much is owed, when memory lets it go, or at the end.
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
from kvboost.tokens.hashing import ChunkKey

COLD_SECONDS = 1.0
LONGEST_PAUSE = 30.0
MOST_FAILURES = 3


@dataclass
class _Owed:
    chunk: KVChunk
    used: float
    tried: int = 0
    """The flush that tried it last."""
    leaving: bool = False
    """Memory has let it go: it is held here alone."""


class Writer:
    """Thread-safe. ``write`` is called by a thread of its own, which starts with the first chunk,
    and says whether a chunk is done with; one that is not is tried again later. ``written`` is
    called when a chunk is owed no more. At most ``max_waiting`` bytes are held that memory has let
    go, and no more than ``max_owed`` are owed for the sake of getting cold."""

    def __init__(
        self,
        write: Callable[[KVChunk], bool],
        written: Callable[[ChunkKey], None],
        *,
        max_waiting: int,
        max_owed: int,
    ) -> None:
        self._write = write
        self._written = written
        self._max_waiting = max_waiting
        self._max_owed = max_owed
        self._owed: OrderedDict[ChunkKey, _Owed] = OrderedDict()  # the coldest first
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

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {
                "owed": len(self._owed),
                "waiting_bytes": self._waiting_bytes,
                "max_waiting_bytes": self._max_waiting,
            }

    def owe(self, chunk: KVChunk, *, leaving: bool = False) -> bool:
        """``chunk`` is to be written; if it is ``leaving`` memory as well, at once. False if that
        would be too much to hold."""
        with self._changed:
            if self._closed:
                return not leaving
            if chunk.key not in self._owed:
                self._owed[chunk.key] = _Owed(chunk, time.monotonic())
                self._nbytes += chunk.nbytes
                self._start()
                self._changed.notify_all()
            return not leaving or self.let_go(chunk.key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These were used: they are not cold."""
        with self._changed:
            for key in keys:
                if (owed := self._owed.get(key)) is not None:
                    owed.used = time.monotonic()
                    self._owed.move_to_end(key)

    def let_go(self, key: ChunkKey) -> bool:
        """Memory lets go of ``key``: true if it is held here until it is written. False if it is
        not owed, or if that would be too much: then it is owed no more."""
        with self._changed:
            owed = self._owed.get(key)
            if owed is None or owed.leaving:
                return owed is not None
            if self._waiting_bytes + owed.chunk.nbytes > self._max_waiting:
                self._settle(key)
                return False
            owed.leaving = True
            self._waiting_bytes += owed.chunk.nbytes
            self._owed.move_to_end(key, last=False)
            self._changed.notify_all()
            return True

    def taken_back(self, key: ChunkKey) -> None:
        """``key`` is in memory again."""
        with self._changed:
            owed = self._owed.get(key)
            if owed is not None and owed.leaving:
                owed.leaving = False
                self._waiting_bytes -= owed.chunk.nbytes

    def get(self, key: ChunkKey) -> KVChunk | None:
        with self._changed:
            owed = self._owed.get(key)
            return owed.chunk if owed else None

    def owes(self, key: ChunkKey) -> bool:
        with self._changed:
            return key in self._owed

    def keys(self) -> list[ChunkKey]:
        with self._changed:
            return list(self._owed)

    def cancel(self, key: ChunkKey) -> None:
        """``key`` is owed no more. It may just be written: see ``await_writing``."""
        with self._changed:
            self._settle(key)

    def await_writing(self) -> None:
        """Returns when what is being written now is written. ``write`` must be able to go on."""
        with self._changed:
            busy = self._busy
            self._changed.wait_for(lambda: busy is None or self._busy != busy)

    def flush(self) -> None:
        """Returns when everything owed now was written, or tried. After ``MOST_FAILURES`` in a row
        the rest is not."""
        if self._is_forked():
            return
        with self._changed:
            self._flush += 1
            number = self._flush
            self._failures = 0
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or not (self._owed or self._busy) or self._flushed >= number
            )

    def close(self) -> None:
        """Writes what is owed, as far as that can be done, and ends."""
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
            for key in list(self._owed):
                self._settle(key)

    def _is_forked(self) -> bool:
        """In a fork the thread is not, and the lock may be held for ever."""
        return self._process != os.getpid()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvboost-write", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a process that ends without closing its engine

    def _work(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                done = self._write(chunk)
            except Exception:  # whatever it is, later chunks must still be written
                done = False
            with self._changed:
                if done:
                    self._settle(chunk.key)
                    self._failures, self._pause = 0, 0.0
                else:
                    self._put_off(chunk.key)
            if done:
                self._written(chunk.key)
            with self._changed:
                self._busy = None
                self._changed.notify_all()

    def _put_off(self, key: ChunkKey) -> None:
        """A chunk could not be written: it comes last, after a while."""
        self._failures += 1
        self._pause = min(max(1.0, 2 * self._pause), LONGEST_PAUSE)
        self._not_before = time.monotonic() + self._pause
        if key in self._owed:
            self._owed.move_to_end(key)

    def _next(self) -> KVChunk | None:
        """The next chunk to write, once there is one; None when it is time to end."""
        with self._changed:
            while not self._closed:
                if (key := self._to_flush()) is not None:
                    self._busy = key
                    self._owed[key].tried = self._flush
                    return self._owed[key].chunk
                rest = self._due() - time.monotonic() if self._owed else None
                if rest is not None and rest <= 0:
                    self._busy = self._ancestor(next(iter(self._owed)))
                    return self._owed[self._busy].chunk
                self._changed.wait(rest)
            return None

    def _to_flush(self) -> ChunkKey | None:
        """What a flush has not tried yet; None, and the flush is over, if there is no more."""
        if self._flushed < self._flush:
            if self._failures < MOST_FAILURES:
                for key, owed in self._owed.items():
                    if owed.tried < self._flush:
                        ancestor = self._ancestor(key)
                        return ancestor if self._owed[ancestor].tried < self._flush else key
            self._flushed = self._flush
            self._changed.notify_all()
        return None

    def _due(self) -> float:
        """When the next chunk is to be written."""
        coldest = next(iter(self._owed.values()))
        if coldest.leaving or self._nbytes > self._max_owed:
            return self._not_before
        return max(self._not_before, coldest.used + COLD_SECONDS)

    def _ancestor(self, key: ChunkKey) -> ChunkKey:
        """What must be there before ``key``, if that is owed too; otherwise ``key``."""
        while (parent := self._owed[key].chunk.info.parent) in self._owed:
            key = parent
        return key

    def _settle(self, key: ChunkKey) -> None:
        owed = self._owed.pop(key, None)
        if owed is not None:
            self._nbytes -= owed.chunk.nbytes
            self._waiting_bytes -= owed.chunk.nbytes if owed.leaving else 0
