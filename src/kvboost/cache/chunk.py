"""The unit of reuse: the keys and values of a run of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from kvboost.tokens.hashing import ChunkKey, TokenIds


class Lineage(str, Enum):
    """What a chunk's rows were computed on."""

    EXACT = "exact"
    """Every row behind it was exact: it may serve exact hits."""
    APPROXIMATE = "approximate"
    """Something behind it was moved: it never serves an exact hit."""


@dataclass(frozen=True, eq=False)
class KVChunk:
    """Immutable. ``kv`` is one contiguous tensor ``[2, layers, kv_heads, tokens, head_dim]``,
    keys first, so that moving a chunk is one copy. Keys are kept exactly as attention produced
    them, rotated for ``base_position`` onwards."""

    key: ChunkKey
    parent: ChunkKey
    token_ids: TokenIds
    kv: torch.Tensor
    base_position: int
    lineage: Lineage

    def __post_init__(self) -> None:
        assert self.kv.is_contiguous() and self.kv.shape[3] == len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()
