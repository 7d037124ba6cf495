"""KV that is pinned for a while, because its text is likely to be sent again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost import KVBoost

PINNED_SHARE = 0.25
"""Of the memory for cached text, what pins of this kind may hold. The rest is evicted as usual."""
MAX_PINS = 1024


@dataclass(frozen=True)
class _Pin:
    ids: bytes
    """Of 32-bit token ids."""
    salt: str
    expires: float

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    def covers(self, other: _Pin) -> bool:
        """Whether this pin makes ``other`` superfluous."""
        return (
            self.salt == other.salt
            and self.expires >= other.expires
            and self.ids.startswith(other.ids)
        )


class KeptKV:
    """Pins beginnings of prompts for some seconds. Only rows that are cached already are pinned. If
    the pins would hold more than ``PINNED_SHARE`` of the cache, the oldest are released. For one
    event loop."""

    def __init__(self, engine: KVBoost, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        """By key, the oldest first."""
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        """Pinned tokens. A beginning that two pins share counts twice."""
        return sum(pin.num_tokens for pin in self._pins.values())

    async def keep(self, key: str, token_ids: Sequence[int], salt: str, seconds: float) -> None:
        """Pins ``token_ids`` for ``seconds``, under a key by which they can be released. Replaces
        pins of beginnings of the same text."""
        ids = np.asarray(token_ids, dtype=np.int32).tobytes()
        pin = _Pin(ids, salt, self._clock() + seconds)
        most = self._max_tokens()
        if seconds <= 0 or pin.num_tokens > most:
            return
        async with self._lock:
            replaced = [
                name for name, other in self._pins.items() if name == key or pin.covers(other)
            ]
            for name in replaced:
                await self._unpin(name)
            await self._pin(pin)
            self._pins[key] = pin
            while self.num_tokens > most or len(self._pins) > MAX_PINS:
                await self._unpin(next(iter(self._pins)))
            self._schedule()

    async def release(self, key: str) -> None:
        """Takes a pin back, if it is still held."""
        async with self._lock:
            if key in self._pins:
                await self._unpin(key)

    async def release_expired(self) -> None:
        async with self._lock:
            now = self._clock()
            for key in [key for key, pin in self._pins.items() if pin.expires <= now]:
                await self._unpin(key)
            self._schedule()

    def _schedule(self) -> None:
        """Sets the timer to the end of the pin that ends first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pins:
            wait = min(pin.expires for pin in self._pins.values()) - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._expire)

    def _expire(self) -> None:
        self._expiring = asyncio.ensure_future(self.release_expired())

    def _max_tokens(self) -> int:
        most = self._engine.config.max_cache_bytes * PINNED_SHARE
        return int(most // self._engine.kv_bytes_per_token)

    async def _pin(self, pin: _Pin) -> None:
        ids = np.frombuffer(pin.ids, dtype=np.int32).tolist()
        with suppress(KVBoostError):  # it is closing; an answer does not depend on a pin
            await asyncio.to_thread(self._engine.pin, ids, cache_salt=pin.salt, read=False)

    async def _unpin(self, key: str) -> None:
        pin = self._pins.pop(key)
        ids = np.frombuffer(pin.ids, dtype=np.int32).tolist()
        with suppress(KVBoostError):
            await asyncio.to_thread(self._engine.unpin, ids, cache_salt=pin.salt)
