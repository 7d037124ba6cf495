"""Chunks in the memory of the GPU that computes: a hit never crosses the bus.

Where running requests have pages, chunks in full precision are pages too. Others are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.quantize import KVData
from kvboost.cache.tiers.ram import RamTier

SPARE_SHARE = 64
"""Where chunks are in pages, one part of so many is kept free: a thread evicts chunks before
requests must."""
ON_THE_WAY = 256 * 1024**2
"""Bytes of rows that are being copied into chunks."""


class Pages(Protocol):
    """The pages of running requests."""

    def has_room(self, num_rows: int, position: int) -> bool:
        """Whether pages are free for so many rows from ``position`` on."""

    def bring(self, data: KVData, position: int) -> KVData | None:
        """A copy in pages of the rows of a chunk from ``position`` on; None if too few are
        free."""


class GpuTier(RamTier):
    name = "gpu"
    pages: Pages | None = None
    """Attached with the first request."""
    on_low: Callable[[], None] = staticmethod(lambda: None)
    """Is called when chunks have come in and less than the spare part of ``max_bytes`` is left."""

    def __init__(self, max_bytes: int, device: torch.device, *, in_pages: bool = False) -> None:
        super().__init__(max_bytes)
        self._device = device
        self.in_pages = in_pages

    def adopt(self, chunks: Sequence[KVChunk]) -> list[KVChunk]:
        if not self.in_pages:
            return super().adopt(chunks)
        return [chunk if chunk.data.in_pages else self._bring_in(chunk) for chunk in chunks]

    def has_spare(self, parts: int = 1) -> bool:
        """Whether so many times the part that is kept free is left."""
        return SPARE_SHARE * (self.max_bytes - self.nbytes) >= parts * self.max_bytes

    def has_pages_for(self, chunk: KVChunk) -> bool:
        """Whether pages are free for the rows of ``chunk``, if it needs some."""
        if self.pages is None or chunk.data.in_pages:
            return True
        return self.pages.has_room(chunk.info.num_tokens, chunk.info.base_position)

    def _bring_in(self, chunk: KVChunk) -> KVChunk:
        data = None
        if self.pages is not None and chunk.data.bits == 16:
            data = self.pages.bring(chunk.data, chunk.info.base_position)
        if data is None:
            raise MemoryError("too few pages are free")
        return replace(chunk, data=data)

    def _allocate_outside(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def _bring(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]
