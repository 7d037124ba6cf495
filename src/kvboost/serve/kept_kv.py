"""KV that is pinned for a while, because its text is likely to be sent again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import kvboost
from kvboost.errors import KVBoostError, PinError
from kvboost.serve.auth import Place
from kvboost.tokens.hashing import TokenIds

MAX_PINS = 1024


@dataclass(frozen=True)
class _Kept:
    place: Place
    ids: bytes
    """Of 32-bit token ids."""
    adapter: str | None
    expires: float

    def covers(self, other: _Kept) -> bool:
        """Whether this pin makes ``other`` superfluous."""
        return (
            (self.place, self.adapter) == (other.place, other.adapter)
            and self.expires >= other.expires
            and self.ids.startswith(other.ids)
        )


class KeptKV:
    """Pins beginnings of prompts for some seconds. Only rows that are cached already are pinned. If
    pins have no more room, the tenant that holds most, with the new pin, loses its oldest one: who
    holds no more than an equal part loses nothing to others. For one event loop."""

    def __init__(
        self, engine: kvboost.KVBoost, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        """By key, the oldest first."""

    def keep(
        self,
        key: str,
        token_ids: TokenIds,
        place: Place,
        seconds: float,
        adapter: str | None = None,
    ) -> None:
        """Pins ``token_ids``, read with ``adapter``, for ``seconds``, under a key by which they can
        be released. Replaces pins of beginnings of the same text."""
        if seconds <= 0:
            return
        kept = _Kept(place, token_ids.tobytes(), adapter, self._clock() + seconds)
        for name, other in list(self._kept.items()):
            if name == key or other.expires <= self._clock() or kept.covers(other):
                self.release(name)
        while len(self._kept) >= MAX_PINS:
            if not self._make_room(kept, lambda _: 1):
                return
        if self._pin(key, token_ids, kept, seconds):
            self._kept[key] = kept

    def release(self, key: str) -> None:
        """Takes a pin back, if it is still held."""
        if self._kept.pop(key, None) is not None:
            self._engine.drop_pin(_name(key))

    def _pin(self, key: str, ids: TokenIds, kept: _Kept, seconds: float) -> bool:
        """Whether something is pinned. An answer does not depend on a pin."""
        while True:
            try:
                pin = self._engine.pin_cached(
                    _name(key), ids, ttl=seconds, cache_salt=kept.place.salt, adapter=kept.adapter
                )
            except PinError:
                if not self._make_room(kept, lambda one: len(one.ids)):
                    return False
            except KVBoostError:  # it is closing
                return False
            else:
                return pin.tokens > 0

    def _make_room(self, new: _Kept, size: Callable[[_Kept], int]) -> bool:
        """Releases the oldest pin of the tenant whose pins have the greatest ``size``, ``new``
        included. False if that is the tenant of ``new`` and it holds no other."""
        sizes = Counter({new.place.owner: size(new)})
        for one in self._kept.values():
            sizes[one.place.owner] += size(one)
        largest = max(sizes, key=sizes.__getitem__)  # of equals the tenant of the new one
        for key, one in self._kept.items():
            if one.place.owner == largest:
                self.release(key)
                return True
        return False


def _name(key: str) -> str:
    return f"kept-{key}"
