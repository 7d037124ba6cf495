"""The contract of a tier."""

from __future__ import annotations

from typing import Protocol

from kvboost.cache.chunk import KVChunk
from kvboost.tokens.hashing import ChunkKey


class Tier(Protocol):
    """Keeps chunks. Synchronous and without threads of its own; the store holds its lock around
    every call. A chunk that cannot be had is ``None``, never an exception."""

    @property
    def name(self) -> str: ...

    @property
    def max_bytes(self) -> int:
        """The budget."""

    @property
    def nbytes(self) -> int:
        """Bytes held now. Never above the budget."""

    def get(self, key: ChunkKey) -> KVChunk | None: ...

    def put(self, chunk: KVChunk) -> bool:
        """Keeps ``chunk``; false, and nothing changed, if that would break the budget."""

    def delete(self, key: ChunkKey) -> None:
        """Forgets ``key`` if it is here."""

    def contains(self, key: ChunkKey) -> bool: ...

    def keys(self) -> list[ChunkKey]: ...

    def close(self) -> None: ...
