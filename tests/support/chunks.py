"""Chunks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvboost.cache.admission import Pack
from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage, Origin
from kvboost.cache.mixed import states_of
from kvboost.cache.quantize import KVData, NewRows, plain
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, as_token_ids, chain_key, root_key

ROOT = root_key("model", "")
ORIGIN = Origin("model", "a model")


def packing(rows: torch.Tensor) -> Pack:
    """Packs parts of ``rows``, ``[2, layers, kv_heads, tokens, head_dim]``."""

    def pack(parts: Sequence[NewRows]) -> list[KVData]:
        return [plain(rows[:, :, :, part.start : part.end].contiguous()) for part in parts]

    return pack


def running_sums(ids: Sequence[int], dim: int = 1) -> torch.Tensor:
    """KV that depends on everything before it: the sum of all tokens so far."""
    sums = torch.cumsum(torch.tensor(ids, dtype=torch.float32), 0)
    return sums.view(1, 1, 1, -1, 1).expand(2, 1, 1, len(ids), dim)


def chunk_store(tiers: Tiers, size: int, **options: Any) -> ChunkStore:
    """A store that cuts texts into chunks of ``size`` tokens."""
    options = {"origin": ORIGIN, **options}
    return ChunkStore(tiers, cut=lambda ids, _: fixed(len(ids), size), **options)


def make_chunk(
    ids: Sequence[int],
    *,
    parent: ChunkKey = ROOT,
    before: ChunkKey | None = None,
    root: ChunkKey = ROOT,
    data: KVData | None = None,
    position: int = 0,
    lineage: Lineage = Lineage.EXACT,
    origin: Origin = ORIGIN,
    key: str | None = None,
) -> KVChunk:
    """A chunk of ``ids``; its data, if none are given, are drawn, the same for the same ids."""
    tokens = as_token_ids(ids)
    if data is None:
        draw = torch.Generator().manual_seed(int(sum(ids)))
        data = plain(torch.randn(2, 2, 1, len(tokens), 4, generator=draw))
    name = chain_key(parent, tokens) if key is None else ChunkKey(key)
    info = ChunkInfo(
        key=name,
        parent=parent,
        before=before or parent,
        root=root,
        token_ids=tokens,
        base_position=position,
        lineage=lineage,
        bits=data.bits,
        nbytes=data.nbytes,
        origin=origin,
        has_state=bool(states_of(data)),
    )
    return KVChunk(info, data)
