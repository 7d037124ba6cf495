from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chunks import make_chunk
from kvboost.cache.tiers.ram import RamTier
from tiny import DEVICE


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


@pytest.mark.skipif(DEVICE != "cuda", reason="copies from a GPU")
def test_data_from_a_gpu_has_arrived_when_it_is_read() -> None:
    tier = RamTier(1 << 30, pinned=True)
    chunk = make_chunk([1] * 4)
    large = (2, 1, 1, 1 << 22, 4)
    moved = replace(chunk, data=chunk.data.map(lambda _: torch.ones(large, device=DEVICE)))
    (brought,) = tier.adopt([moved])
    del moved
    torch.zeros(large, device=DEVICE)  # takes the memory of what was copied
    tier.put(brought)
    assert tier.get(chunk.key) is brought
    for tensor in brought.data.tensors.values():
        assert tensor.is_pinned() and bool((tensor == 1).all())
