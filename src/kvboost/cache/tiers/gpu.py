"""Chunks in the memory of the GPU that computes: a hit never crosses the bus."""

from __future__ import annotations

import torch

from kvboost.cache.tiers.ram import RamTier


class GpuTier(RamTier):
    name = "gpu"

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        super().__init__(max_bytes)
        self._device = device

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)
