"""Chunks in the memory of the GPU that computes: a hit never crosses the bus."""

from __future__ import annotations

from contextlib import suppress

import torch

from kvboost.cache.tiers.ram import RamTier

ON_THE_WAY = 256 * 1024**2
"""Bytes of rows that are being copied into chunks."""


class GpuTier(RamTier):
    name = "gpu"

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        """Has torch take all of its memory from the driver: piece by piece, that would hold up
        requests while the tier fills."""
        super().__init__(max_bytes)
        self._device = device
        if device.type == "cuda":
            with suppress(torch.OutOfMemoryError):
                torch.empty(max_bytes + ON_THE_WAY, dtype=torch.uint8, device=device)

    def _allocate_outside(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def _bring(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]
