from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvboost.cache.quantize import Quantizer
from kvboost.cache.tiers.gpu import GpuTier
from kvboost.cache.tiers.ram import RamTier
from support.chunks import make_chunk
from support.tiny import DEVICE


def test_a_tier_keeps_its_budget_and_counts_bytes() -> None:
    first, second = make_chunk([1] * 4), make_chunk([2] * 4)
    tier = RamTier(first.nbytes + second.nbytes - 1)
    assert tier.put(first)
    assert not tier.put(second)
    assert tier.put(first)  # again is no more
    assert tier.nbytes == first.nbytes
    assert tier.get(first.key) is first
    assert tier.get(second.key) is None
    assert tier.keys() == [first.key]
    tier.delete(first.key)
    tier.delete(first.key)
    assert tier.nbytes == 0
    assert tier.put(second)
    assert tier.keys() == [second.key]
    tier.close()
    assert (tier.nbytes, tier.keys()) == (0, [])


class Elsewhere(RamTier):
    """Takes tensors of the host for those of another device."""

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return False


def test_chunks_of_another_device_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy_all = torch._foreach_copy_

    def counting(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied.append(len(targets))
        copy_all(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    quantized = Quantizer(8, None).pack(torch.randn(2, 2, 1, 40, 4), 0)
    chunks = [make_chunk([1] * 4), make_chunk(range(40), data=quantized), make_chunk([3] * 3)]
    brought = Elsewhere(1 << 20).adopt(chunks)
    assert copied == [1 + len(quantized.tensors) + 1]
    for one, chunk in zip(brought, chunks, strict=True):
        assert one.info is chunk.info and one.data.bits == chunk.data.bits
        for name, tensor in chunk.data.tensors.items():
            copy = one.data.tensors[name]
            assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
            assert copy.nbytes == 0 or copy.data_ptr() != tensor.data_ptr()


def test_chunks_that_are_here_are_not_copied() -> None:
    chunks = [make_chunk([1] * 4), make_chunk([2] * 4)]
    for tier in (RamTier(1 << 20), GpuTier(1 << 20, torch.device("cpu"))):
        adopted = tier.adopt(chunks)
        assert all(one is chunk for one, chunk in zip(adopted, chunks, strict=True))


@pytest.mark.skipif(DEVICE != "cuda", reason="copies from a GPU")
def test_data_from_a_gpu_has_arrived_when_it_is_read() -> None:
    tier = RamTier(1 << 30, pinned=True)
    chunk = make_chunk([1] * 4)
    large = (2, 1, 1, 4, 1 << 22)
    moved = replace(chunk, data=chunk.data.map(lambda _: torch.ones(large, device=DEVICE)))
    (brought,) = tier.adopt([moved])
    del moved
    torch.zeros(large, device=DEVICE)  # takes the memory of what was copied
    tier.put(brought)
    assert tier.get(chunk.key) is brought
    for tensor in brought.data.tensors.values():
        assert tensor.is_pinned() and bool((tensor == 1).all())
