"""Chunks in memory: the host's, or that of a GPU."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.tiers.arena import Arena
from kvboost.tokens.hashing import ChunkKey

_LEAST_MAPPED = 1 << 18


class CopiesAside:
    """Copies from a GPU to locked memory, on a stream of their own. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        """The tensors that are read and written, which must stay until their event has happened."""
        self._lock = threading.Lock()

    def start(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with self._lock:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self._copied.append((self._stream.record_event(), [*sources, *targets]))
            self._release()

    def settle(self) -> None:
        """Waits for all copies."""
        self._stream.synchronize()
        with self._lock:
            self._release()

    def _release(self) -> None:
        while self._copied and self._copied[0][0].query():  # type: ignore[no-untyped-call]
            self._copied.popleft()


class RamTier:
    """In host memory, ``pinned`` where a GPU reads from it."""

    name = "ram"

    def __init__(self, max_bytes: int, *, pinned: bool = False, arena: Arena | None = None) -> None:
        """``arena``: where tensors are, if it has room for them."""
        self.max_bytes = max_bytes
        self.faults: dict[str, int] = {}
        self._pinned = pinned
        self._arena = arena
        self._copies: CopiesAside | None = None
        """Where copies from a GPU are under way."""
        self._chunks: dict[ChunkKey, KVChunk] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def adopt(self, chunks: Sequence[KVChunk]) -> list[KVChunk]:
        """``chunks`` with their data in this tier's memory; themselves if they are there already.
        Does not change the tier and needs no lock. Data from a GPU may still be on its way:
        ``settle`` waits for it, and ``get`` does."""
        if paged := [one for one in chunks if one.data.in_pages]:
            rows = iter(paged[0].data.gather([one.data for one in paged]))
            chunks = [replace(one, data=next(rows)) if one.data.in_pages else one for one in chunks]
        elsewhere = [
            tensor
            for chunk in chunks
            for tensor in chunk.data.tensors.values()
            if not self._is_here(tensor)
        ]
        if not elsewhere:
            return list(chunks)
        brought = iter(self._bring(elsewhere))

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self._is_here(tensor) else next(brought)

        return [KVChunk(chunk.info, chunk.data.map(bring)) for chunk in chunks]

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """An empty tensor in this tier's memory, with the dtype and shape of ``like``."""
        return self._allocate([like])[0]

    def _allocate(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """An empty tensor for each of ``likes``: as :meth:`allocate`, together."""
        if self._arena is None:
            return [self._allocate_outside(like) for like in likes]
        return [
            self._allocate_outside(like) if found is None else found
            for like, found in zip(likes, self._arena.empty(likes), strict=True)
        ]

    def _allocate_outside(self, like: torch.Tensor) -> torch.Tensor:
        """As :meth:`allocate`, outside of the arena.

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

    def settle(self) -> None:
        """Waits for copies from a GPU."""
        if self._copies is not None:
            self._copies.settle()

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this tier's kind of memory."""
        return tensor.device.type == "cpu"

    def _bring(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors of one device in this tier's memory."""
        brought = self._allocate(tensors)
        if not self._pinned:
            torch._foreach_copy_(brought, tensors)
            return brought
        if self._copies is None:
            self._copies = CopiesAside(tensors[0].device)
        self._copies.start(brought, tensors)
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

    def keys(self) -> list[ChunkKey]:
        return list(self._chunks)

    def close(self) -> None:
        self._chunks.clear()
        self._nbytes = 0
        if self._arena is not None:
            self._arena.close()
