"""The contract of a tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.tokens.hashing import ChunkKey


class Tier(Protocol):
    """Keeps chunks. Synchronous, without threads of its own. Where it fails, chunks are ``None``,
    ``put`` is false and a counter in ``faults`` moves; nothing is raised.

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
        """What went wrong so far, by kind."""

    def get(self, key: ChunkKey) -> KVChunk | None: ...

    def put(self, chunk: KVChunk) -> bool:
        """Keeps ``chunk``; false, and nothing changed, if it cannot or if that would break the
        budget. True if it is here already."""

    def delete(self, key: ChunkKey) -> None:
        """Forgets ``key`` if it is here."""

    def contains(self, key: ChunkKey) -> bool: ...

    def keys(self) -> list[ChunkKey]: ...

    def infos(self) -> Iterator[ChunkInfo]:
        """What is here, without the data. May take long where it is far away."""

    def close(self) -> None: ...
