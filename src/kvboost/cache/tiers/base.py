"""The contract of a tier."""

from __future__ import annotations

from typing import Protocol

from kvboost.cache.chunk import KVChunk
from kvboost.tokens.hashing import ChunkKey


class Tier(Protocol):
    """Keeps chunks. Synchronous, without threads of its own. A failure raises nothing: a chunk is
    ``None``, ``put`` is false, and a counter in ``faults`` goes up.

    Tiers in memory are called with the store's lock held. The others are slow: they are safe to
    call from several threads, and no lock is held around them.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_bytes(self) -> int:
        """The budget."""

    @property
    def nbytes(self) -> int:
        """Bytes held now, as this tier counts them. Never above the budget."""

    @property
    def faults(self) -> dict[str, int]:
        """The faults so far, by kind."""

    def get(self, key: ChunkKey) -> KVChunk | None: ...

    def put(self, chunk: KVChunk) -> bool:
        """Keeps ``chunk``; true if it is there already. False, and nothing changed, if it cannot
        or if that would exceed the budget."""

    def delete(self, key: ChunkKey) -> None:
        """Removes ``key`` if it is there."""

    def keys(self) -> list[ChunkKey]: ...

    def close(self) -> None: ...
