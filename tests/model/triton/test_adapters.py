"""What adapters add to products, row by row, against torch."""

from __future__ import annotations

import pytest
import torch

import torch_kernels
from kvboost.model.triton import adapters
from paged_kv import random
from tiny import DEVICE


@pytest.mark.parametrize("heights", [(40,), (24, 24), (32, 8, 8)])
def test_each_row_has_its_own_adapter(
    heights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "SHRINK_BLOCK", 16)  # several steps, the last one not full
    monkeypatch.setattr(adapters, "EXPAND_BLOCK", 16)
    parts, ranks, width = len(heights), 16, 40
    rows, out = random(3, width), random(3, sum(heights))
    down, up = random(2, parts * ranks, width), random(2, ranks, sum(heights))
    slots = torch.tensor([1, -1, 0], device=DEVICE)
    bounds = sum(heights[:1]), sum(heights[:2])
    found = []
    for kernels in (adapters, torch_kernels):
        sums = torch.full((adapters.num_splits(width), 3, parts * ranks), torch.nan, device=DEVICE)
        result = out.clone()
        kernels.shrink(rows, slots, down, ranks, sums)
        kernels.expand(sums, slots, up, bounds, result)
        found.append(result)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-4)
    assert torch.equal(found[0][1], out[1]) and not torch.allclose(found[0][0], out[0])
