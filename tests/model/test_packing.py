from __future__ import annotations

import pytest
import torch
from torch import nn

from kvboost.model.packing import FEW_ROWS, PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")
# The layers work in float32 too; there it only does not pay.
DTYPE = torch.bfloat16 if can_pack(CPU, torch.bfloat16) else torch.float32


def test_only_bfloat16_on_a_cpu_that_has_it() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("meta"), torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 32, 65, 200])
def test_packed_layers_give_what_plain_ones_give(rows, bias) -> None:
    """To rounding for few rows, to the bit for many."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).to(DTYPE)
    x = torch.randn(1, rows, 64).to(DTYPE)
    with torch.inference_mode():
        packed, plain = PackedLinear(linear)(x), linear(x)
    assert torch.allclose(packed, plain, rtol=2**-7)
    assert rows <= FEW_ROWS or torch.equal(packed, plain)


def test_a_tied_weight_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.body = nn.Sequential(nn.Linear(8, 8))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().to(DTYPE)
    assert pack_linears(model) == 1
    assert isinstance(model.body[0], PackedLinear)
    assert type(model.head) is nn.Linear


def test_copies_that_would_fill_the_memory_are_not_made(monkeypatch) -> None:
    monkeypatch.setattr("kvboost.model.packing.memory_bytes", lambda: 1000)
    model = nn.Sequential(nn.Linear(64, 64)).to(DTYPE)
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
