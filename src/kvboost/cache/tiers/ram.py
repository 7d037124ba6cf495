"""Chunks in memory."""

from __future__ import annotations

from kvboost.cache.chunk import KVChunk
from kvboost.tokens.hashing import ChunkKey


class RamTier:
    name = "ram"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._chunks: dict[ChunkKey, KVChunk] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def get(self, key: ChunkKey) -> KVChunk | None:
        return self._chunks.get(key)

    def put(self, chunk: KVChunk) -> bool:
        if chunk.key in self._chunks:
            return True
        if self._nbytes + chunk.nbytes > self.max_bytes:
            return False
        self._chunks[chunk.key] = chunk
        self._nbytes += chunk.nbytes
        return True

    def delete(self, key: ChunkKey) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._nbytes -= chunk.nbytes

    def contains(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def keys(self) -> list[ChunkKey]:
        return list(self._chunks)

    def close(self) -> None:
        self._chunks.clear()
        self._nbytes = 0
