"""Publishes which blocks a store holds, so that routers made for vLLM follow it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvboost.cache.events.announcements import Announcements, Cleared, Removed, Stored
from kvboost.cache.events.layout import as_map, block_hashes
from kvboost.cache.events.sender import Sender
from kvboost.cache.lookup.hits import Hit
from kvboost.config import KVEvents
from kvboost.tokens.hashing import ChunkKey, TokenIds

logger = logging.getLogger("kvboost.events")

MAX_WAITING = 100_000
"""Changes of the store that may wait for the thread."""
MAX_TOGETHER = 256
"""Changes in one message."""
GATHER_SECONDS = 0.02
"""Changes within this time go into one message, so that a chunk which a longer one replaces is not
taken back and announced again."""
MAX_WAITING_TOKENS = 1 << 24
"""Tokens of texts among the changes that wait."""
TOKENS_TOGETHER = 1 << 16
"""Tokens in one message, if they are those of several texts."""


@dataclass(frozen=True)
class _Rows:
    token_ids: TokenIds
    exact: tuple[Hit, ...]


@dataclass(frozen=True)
class _Gone:
    key: ChunkKey


@dataclass(frozen=True)
class EventStats:
    blocks: int
    """Blocks that are announced now."""
    messages: int
    dropped: int
    """Changes that were not announced because too many waited. Routers are then told to forget
    everything, and blocks are announced again when requests use them."""
    failed: int
    """Messages that could not be made or sent."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class EventPublisher:
    """A :class:`kvboost.cache.holdings.StoreListener` whose methods only fill a queue. One
    thread names the blocks, encodes and sends. ``root`` is the tree whose chunks are announced,
    ``medium`` says where blocks are, and ``is_known`` whether a chunk is in some tier."""

    def __init__(
        self,
        settings: KVEvents,
        root: ChunkKey,
        *,
        medium: str,
        is_known: Callable[[ChunkKey], bool],
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._root = root
        self._block_size = settings.block_size
        self._medium = medium
        self.is_known = is_known
        self._changes: queue.Queue[_Rows | _Gone | Cleared] = queue.Queue(max_waiting)
        self._announced = Announcements(settings.block_size)
        self._overflowed = False
        self._closing = False
        self._refused = self._discarded = self._messages = self._failed = 0
        self._tokens_put = self._tokens_taken = 0  # by the store, and by the thread
        self.sender = Sender(settings)
        self._thread = threading.Thread(target=self._run, name="kvboost-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self.sender.endpoint

    def on_stored(self, token_ids: TokenIds, exact: Sequence[Hit]) -> None:
        self._put(_Rows(token_ids, tuple(exact)))

    def on_gone(self, key: ChunkKey) -> None:
        self._put(_Gone(key))

    def on_cleared(self) -> None:
        self._put(Cleared())

    def stats(self) -> EventStats:
        return EventStats(
            blocks=len(self._announced),
            messages=self._messages,
            dropped=self._refused + self._discarded,
            failed=self._failed,
        )

    def close(self) -> None:
        """Publishes what is waiting, and that nothing is held any more. Changes after this are
        dropped."""
        self._closing = True
        self._put(Cleared())  # wakes the thread
        self._thread.join()

    def _put(self, change: _Rows | _Gone | Cleared) -> None:
        """Called with the store's lock held, or by ``close``."""
        tokens = _num_tokens(change)
        try:
            if self._tokens_put + tokens - self._tokens_taken > MAX_WAITING_TOKENS:
                raise queue.Full
            self._changes.put_nowait(change)
            self._tokens_put += tokens
        except queue.Full:
            self._refused += 1
            self._overflowed = True

    # The thread.

    def _run(self) -> None:
        while not self._closing or not self._changes.empty():
            try:
                self.sender.answer_replays()
                self._publish(self._gather(self.sender.replay_seconds))
            except Exception as error:  # no message is worth the server
                self._failed += 1
                self._overflowed = True  # routers have missed something
                logger.warning("KV events could not be published: %s", type(error).__name__)
        self.sender.close()

    def _gather(self, timeout: float | None) -> list[_Rows | _Gone | Cleared]:
        """The changes; empty if there are none within ``timeout``."""
        try:
            changes = [self._take(timeout)]
        except queue.Empty:
            return []
        if not self._closing:
            time.sleep(GATHER_SECONDS)
        tokens = _num_tokens(changes[0])
        while len(changes) < MAX_TOGETHER and not self._changes.empty():
            if tokens > TOKENS_TOGETHER:
                break
            changes.append(self._take())
            tokens += _num_tokens(changes[-1])
        return changes

    def _take(self, timeout: float | None = 0) -> _Rows | _Gone | Cleared:
        """The next change; raises ``queue.Empty`` if there is none within ``timeout``."""
        change = self._changes.get(block=timeout != 0, timeout=timeout or None)
        self._tokens_taken += _num_tokens(change)
        return change

    def _publish(self, changes: Sequence[_Rows | _Gone | Cleared]) -> None:
        said: list[Stored | Removed | Cleared] = []
        if self._overflowed:
            self._overflowed = False
            self._discarded += len(changes) + self._discard()
            changes = [Cleared()]
        for change in changes:
            if isinstance(change, _Rows):
                names = block_hashes(self._root, change.token_ids, self._block_size)
                self._announced.store(names, change.token_ids, change.exact)
            elif isinstance(change, _Gone):
                self._announced.gone([change.key])
            else:
                said += [*self._announced.take(self.is_known), *self._announced.clear()]
        said += self._announced.take(self.is_known)
        if said:
            self.sender.send([as_map(one, self._block_size, self._medium) for one in said])
            self._messages += 1

    def _discard(self) -> int:
        """Empties the queue; returns how much was in it."""
        number = 0
        while not self._changes.empty():
            self._take()
            number += 1
        return number


def _num_tokens(change: _Rows | _Gone | Cleared) -> int:
    return len(change.token_ids) if isinstance(change, _Rows) else 0
