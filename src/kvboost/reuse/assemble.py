"""Copies cached KV into a request's own buffer, rotating the keys of moved text."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVData, Quantizer


class KVRows(Protocol):
    """A request's preallocated KV."""

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A view of rows ``[start, end)``: ``[2, layers, kv_heads, end - start, head_dim]``."""


def place(hit: Hit, data: KVData, kv: KVRows, packer: Quantizer) -> None:
    """Copies the rows of a hit from its chunk's ``data`` into ``kv``."""
    rows = kv.rows(hit.start, hit.end)
    packer.place(data, hit.chunk.base_position, hit.offset, hit.start, rows)
