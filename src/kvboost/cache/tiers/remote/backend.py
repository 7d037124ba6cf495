"""The contract of a remote store's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from kvboost.tokens.hashing import ChunkKey

Fault = Literal["timeout", "unreachable", "full", "corrupt", "error"]
"""What can go wrong. "full" and "corrupt" mean that the store itself answered."""


class Backend(Protocol):
    """Keeps values by key on another machine, within a budget. Safe to call from several threads.
    A call that fails may raise any exception; ``fault`` says what kind it is."""

    @property
    def max_bytes(self) -> int: ...

    def fault(self, error: Exception) -> Fault: ...

    def get(self, key: ChunkKey) -> bytes | None:
        """The value as it was received, unchecked; None if there is none. If something else than
        a value of ours has this key, bytes that are not a chunk."""

    def put(self, key: ChunkKey, value: bytes) -> bool:
        """Keeps ``value``, a whole chunk as ``codec.encode`` writes it, and evicts older values
        first if the budget requires it. False if it does not fit or another writer was faster. A
        value exists whole or not at all. True if there is one already."""

    def delete(self, key: ChunkKey) -> None: ...

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` there is a value for, in one round trip."""

    def keys(self) -> list[ChunkKey]: ...

    def headers(self, keys: Sequence[ChunkKey]) -> list[bytes | None]:
        """The beginnings of these values, long enough for ``codec.read_header``."""

    def nbytes(self) -> int: ...

    def close(self) -> None: ...
