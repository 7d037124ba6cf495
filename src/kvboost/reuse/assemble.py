"""Copies cached KV into a request's own buffer, rotating the keys of moved text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVData, Quantizer


class KVRows(Protocol):
    """A request's preallocated KV."""

    def filling(self, start: int, end: int) -> AbstractContextManager[torch.Tensor]:
        """Rows ``[start, end)``, ``[2, layers, kv_heads, end - start, head_dim]``, to be
        overwritten until the context exits."""


def place(hit: Hit, data: KVData, kv: KVRows, packer: Quantizer) -> None:
    """Copies the rows of a hit from its chunk's ``data`` into ``kv``."""
    with kv.filling(hit.start, hit.end) as rows:
        packer.place(data, hit.chunk.base_position, hit.offset, hit.start, rows)
