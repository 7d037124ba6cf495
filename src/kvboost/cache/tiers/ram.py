"""Chunks in memory: the host's, or that of a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.tokens.hashing import ChunkKey

_LEAST_MAPPED = 1 << 18


class RamTier:
    """In host memory, ``pinned`` where a GPU reads from it."""

    name = "ram"

    def __init__(self, max_bytes: int, *, pinned: bool = False) -> None:
        self.max_bytes = max_bytes
        self.faults: dict[str, int] = {}
        self._pinned = pinned
        self._chunks: dict[ChunkKey, KVChunk] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def adopt(self, chunk: KVChunk) -> KVChunk:
        """``chunk`` with its data in this tier's memory; itself if it is there already. Does not
        change the tier and needs no lock."""
        return replace(chunk, data=chunk.data.map(self._bring))

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """An empty tensor in this tier's memory, with the dtype and shape of ``like``.

        Large tensors are mapped, and go back to the system when their chunk is evicted. On the heap
        they would be scattered among the short-lived tensors of forwards, and it would only grow.
        """
        if not self._pinned and like.nbytes >= _LEAST_MAPPED:
            with suppress(OSError):  # a process may have only so many maps
                memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this tier's memory."""
        return self.allocate(tensor).copy_(tensor)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" else self.own(tensor)

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

    def infos(self) -> Iterator[ChunkInfo]:
        return (chunk.info for chunk in list(self._chunks.values()))

    def close(self) -> None:
        self._chunks.clear()
        self._nbytes = 0
