from __future__ import annotations

import torch

from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.tiers.ram import RamTier
from kvboost.tokens.hashing import as_token_ids, chain_key, root_key

ROOT = root_key("model", "", "exact")


def chunk(number: int, tokens: int = 4) -> KVChunk:
    ids = as_token_ids([number] * tokens)
    kv = torch.full((2, 1, 1, tokens, 2), float(number))
    return KVChunk(chain_key(ROOT, ids), ROOT, ids, kv, 0, Lineage.EXACT)


def test_a_tier_keeps_its_budget_and_counts_bytes() -> None:
    first, second = chunk(1), chunk(2)
    tier = RamTier(first.nbytes + second.nbytes - 1)
    assert tier.put(first)
    assert not tier.put(second)
    assert tier.put(first)  # again is no more
    assert tier.nbytes == first.nbytes
    assert tier.get(first.key) is first
    assert tier.get(second.key) is None
    assert tier.contains(first.key)
    tier.delete(first.key)
    tier.delete(first.key)
    assert tier.nbytes == 0
    assert tier.put(second)
    assert tier.keys() == [second.key]
    tier.close()
    assert (tier.nbytes, tier.keys()) == (0, [])
