"""Chunks in memory: the host's, or that of a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.tiers.arena import Arena
from kvboost.tokens.hashing import ChunkKey

_LEAST_MAPPED = 1 << 18


class RamTier:
    """In host memory, ``pinned`` where a GPU reads from it."""

    name = "ram"

    def __init__(self, max_bytes: int, *, pinned: bool = False, arena: Arena | None = None) -> None:
        """``arena``: where tensors are, if it has room for them."""
        self.max_bytes = max_bytes
        self.faults: dict[str, int] = {}
        self._pinned = pinned
        self._arena = arena
        self._copies: torch.cuda.Stream | None = None
        """Where copies from a GPU are under way."""
        self._chunks: dict[ChunkKey, KVChunk] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def adopt(self, chunk: KVChunk) -> KVChunk:
        """``chunk`` with its data in this tier's memory; itself if it is there already. Does not
        change the tier and needs no lock. Data from a GPU may still be on its way: ``settle``
        waits for it, and ``get`` does."""
        return replace(chunk, data=chunk.data.map(self._bring))

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """An empty tensor in this tier's memory, with the dtype and shape of ``like``.

        Large tensors are mapped, and go back to the system when their chunk is evicted. On the heap
        they would be scattered among the short-lived tensors of forwards, and it would only grow.
        """
        if self._arena is not None:
            found = self._arena.empty(like.shape, like.dtype)
            if found is not None:
                return found
        if not self._pinned and like.nbytes >= _LEAST_MAPPED:
            with suppress(OSError):  # a process may have only so many maps
                memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this tier's memory."""
        return self.allocate(tensor).copy_(tensor)

    def settle(self) -> None:
        """Waits for copies from a GPU."""
        if self._copies is not None:
            self._copies.synchronize()

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda" or not self._pinned:
            return tensor if tensor.device.type == "cpu" else self.own(tensor)
        if self._copies is None:
            self._copies = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._copies.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._copies):
            brought = self.allocate(tensor).copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)
        return brought

    def get(self, key: ChunkKey) -> KVChunk | None:
        found = self._chunks.get(key)
        if found is not None:
            self.settle()
        return found

    def get_all(self, keys: Sequence[ChunkKey]) -> list[KVChunk] | None:
        """All of these chunks; None if one is missing."""
        try:
            found = [self._chunks[key] for key in keys]
        except KeyError:
            return None
        self.settle()
        return found

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
        if self._arena is not None:
            self._arena.close()
