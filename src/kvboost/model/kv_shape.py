"""The shape of one token's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's KV in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Memory for ``num_tokens`` rows of finite numbers: a mask does not hide NaN."""
        size = (2, self.num_layers, self.num_kv_heads, num_tokens, self.head_dim)
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        # The system provides zeros page by page, on first touch; torch would touch every page now.
        return torch.from_numpy(
            np.zeros((*size[:-1], size[-1] * self.dtype.itemsize), np.uint8)
        ).view(self.dtype)
