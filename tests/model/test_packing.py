from __future__ import annotations

import pytest
import torch
from torch import nn

from kvboost.model.packing import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")
packable = can_pack(CPU, torch.bfloat16)


def test_only_bfloat16_on_a_cpu_that_has_it() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("meta"), torch.bfloat16)


@pytest.mark.skipif(not packable, reason="this CPU has no bfloat16 matrix units")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_packed_layers_give_the_same_bits(rows, bias) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).bfloat16()
    x = torch.randn(2, rows, 64).bfloat16()
    with torch.inference_mode():
        assert torch.equal(PackedLinear(linear)(x), linear(x))


@pytest.mark.skipif(not packable, reason="this CPU has no bfloat16 matrix units")
def test_a_tied_weight_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.body = nn.Sequential(nn.Linear(8, 8))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().bfloat16()
    assert pack_linears(model) == 1
    assert isinstance(model.body[0], PackedLinear)
    assert type(model.head) is nn.Linear
