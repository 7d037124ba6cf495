"""Texts in a store with several tiers, in chunks of four tokens."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from kvboost.cache.admission import Pack
from kvboost.cache.store import ChunkLost, ChunkStore
from kvboost.tokens.hashing import as_token_ids
from support.chunks import ROOT, packing, running_sums

CHUNK = 4
DIM = 64
CHUNK_BYTES = 2 * 4 * DIM * CHUNK


def rows_of(ids: list[int]) -> Pack:
    return packing(running_sums(ids, DIM))


def admit(store: ChunkStore, ids: list[int], root: str = ROOT) -> int:
    return store.admit(root, as_token_ids(ids), rows_of(ids), exact_rows=len(ids))


def hits(store: ChunkStore, ids: list[int], root: str = ROOT) -> list[str]:
    """The tiers that serve the beginning of ``ids``; the rows must be what was stored."""
    expected = running_sums(ids, DIM)
    while True:
        with store.lookup(root, as_token_ids(ids)) as known:
            try:
                for hit, data in store.fetch(known.exact):
                    kv = data.tensors["kv"][:, :, :, : hit.num_tokens]
                    assert torch.equal(kv, expected[:, :, :, hit.start : hit.end])
            except ChunkLost:
                continue
            store.touch(known.exact)
            return [hit.tier for hit in known.exact]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


def text(seed: int, num_tokens: int = 12) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)
