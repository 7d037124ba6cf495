"""Pins: texts whose chunks must not be evicted, each under a name, for ever or for some time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvboost.cache.lookup.hits import Hit
from kvboost.config import format_bytes
from kvboost.errors import PinError
from kvboost.results import Pin
from kvboost.tokens.hashing import ChunkKey, TokenIds


@dataclass
class PinnedText:
    """One pin: the chunks that hold the first rows of a text."""

    root: ChunkKey
    token_ids: TokenIds
    repair: str
    """The repair of the text's approximate rows."""
    expires: float | None
    """When it ends, by the clock of the pins; None: never."""
    keys: set[ChunkKey] = field(default_factory=set)


@dataclass
class _PinnedChunk:
    nbytes: int
    pins: set[str] = field(default_factory=set)


class Pins:
    """Pins by name. An expired pin is dropped at the next call: it needs no timer and no thread,
    because a pin only matters while something is to be evicted or listed.

    Not thread-safe: the store holds its lock around every call.
    """

    def __init__(
        self, max_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``max_bytes`` bounds the chunks of all pins; a chunk that several hold counts once."""
        self.max_bytes = max_bytes
        self._clock = clock
        self._pins: dict[str, PinnedText] = {}
        self._chunks: dict[ChunkKey, _PinnedChunk] = {}
        self._next_expiry = float("inf")
        self._stale: set[str] = set()
        """Pins that have lost chunks."""

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a chunk is pinned."""
        self._drop_expired()
        return key in self._chunks

    def __len__(self) -> int:
        """The number of chunks that are pinned."""
        self._drop_expired()
        return len(self._chunks)

    @property
    def nbytes(self) -> int:
        self._drop_expired()
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def set(
        self,
        name: str,
        root: ChunkKey,
        token_ids: TokenIds,
        hits: Sequence[Hit],
        *,
        repair: str = "",
        ttl: float | None = None,
    ) -> Pin:
        """Pins ``hits``, which hold the beginning of ``token_ids``, for ``ttl`` seconds, instead
        of what ``name`` has pinned so far. Raises PinError and changes nothing if the budget is
        too small. Without hits there is no pin."""
        self._drop_expired()
        self._check_budget(name, hits)
        self.drop(name)
        if not hits:
            return Pin(name, tokens=0, chunks=0, bytes=0, ttl=ttl)
        expires = None if ttl is None else self._clock() + ttl
        self._pins[name] = PinnedText(root, token_ids[:0], repair, expires)
        self._hold(name, token_ids, hits)
        self._next_expiry = min(self._next_expiry, float("inf") if expires is None else expires)
        return self._describe(name)

    def drop(self, name: str) -> Pin | None:
        """Ends a pin; returns what it was, or None if there is no pin of that name."""
        self._drop_expired()
        if name not in self._pins:
            return None
        was = self._describe(name)
        self._release(name)
        del self._pins[name]
        self._stale.discard(name)
        return was

    def all(self) -> list[Pin]:
        """All pins, in the order in which they end; those without an end come last."""
        self._drop_expired()
        pins = [self._describe(name) for name in self._pins]
        return sorted(pins, key=lambda pin: float("inf") if pin.ttl is None else pin.ttl)

    def on_gone(self, key: ChunkKey) -> None:
        """A chunk is in no tier any more. Call :meth:`settle` afterwards."""
        if (chunk := self._chunks.pop(key, None)) is not None:
            self._stale |= chunk.pins
            for name in chunk.pins:
                self._pins[name].keys.discard(key)

    def settle(self, find: Callable[[PinnedText], Sequence[Hit]]) -> None:
        """Makes pins that have lost chunks hold what ``find`` finds of their text now, perhaps in
        other chunks. A pin forgets the part of its text that is not found, and ends if nothing is:
        what was forgotten is kept nowhere."""
        for name in self._stale & set(self._pins):
            pin = self._pins[name]
            hits = find(pin)
            self._release(name)
            self._hold(name, pin.token_ids, hits)
            if not hits:
                del self._pins[name]
        self._stale.clear()

    def _check_budget(self, name: str, hits: Sequence[Hit]) -> None:
        if self.max_bytes is None:
            return
        others = {key: one.nbytes for key, one in self._chunks.items() if one.pins != {name}}
        taken = sum(others.values())
        own = {hit.chunk.key: hit.chunk.nbytes for hit in hits}
        needed = sum(nbytes for key, nbytes in own.items() if key not in others)
        if needed and taken + needed > self.max_bytes:
            raise PinError(
                f"pinning {hits[-1].end:,} tokens needs {format_bytes(needed)}, but pins hold "
                f"{format_bytes(taken)} of the {format_bytes(self.max_bytes)} that "
                "max_pinned_bytes allows; unpin something, pin with a ttl, or raise "
                "max_pinned_bytes"
            )

    def _hold(self, name: str, token_ids: TokenIds, hits: Sequence[Hit]) -> None:
        pin = self._pins[name]
        pin.token_ids = token_ids[: hits[-1].end if hits else 0].copy()
        for hit in hits:
            pin.keys.add(hit.chunk.key)
            self._chunks.setdefault(hit.chunk.key, _PinnedChunk(hit.chunk.nbytes)).pins.add(name)

    def _release(self, name: str) -> None:
        pin = self._pins[name]
        for key in pin.keys:
            chunk = self._chunks[key]
            chunk.pins.discard(name)
            if not chunk.pins:
                del self._chunks[key]
        pin.keys = set()

    def _drop_expired(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        ends = {name: pin.expires for name, pin in self._pins.items() if pin.expires is not None}
        for name in [name for name, expires in ends.items() if expires <= now]:
            self._release(name)
            del self._pins[name], ends[name]
        self._next_expiry = min(ends.values(), default=float("inf"))

    def _describe(self, name: str) -> Pin:
        pin = self._pins[name]
        return Pin(
            name=name,
            tokens=len(pin.token_ids),
            chunks=len(pin.keys),
            bytes=sum(self._chunks[key].nbytes for key in pin.keys),
            ttl=None if pin.expires is None else max(0.0, pin.expires - self._clock()),
        )
