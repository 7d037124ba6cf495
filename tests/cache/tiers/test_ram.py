from __future__ import annotations

from chunks import make_chunk
from kvboost.cache.tiers.ram import RamTier


def test_a_tier_keeps_its_budget_and_counts_bytes() -> None:
    first, second = make_chunk([1] * 4), make_chunk([2] * 4)
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
