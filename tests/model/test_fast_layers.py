from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from kvboost.model.fast_layers import FEW_ROWS, PackedLinear, can_pack, pack_layers
from kvboost.model.native.build import load_library

CPU = torch.device("cpu")
# The layers work in float32 too; there it only does not pay.
DTYPE = torch.bfloat16 if can_pack(CPU, torch.bfloat16) else torch.float32


def test_only_bfloat16_on_a_cpu_that_has_it() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("meta"), torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 32, 65, FEW_ROWS + 1])
def test_packed_layers_give_what_plain_ones_give(rows, bias) -> None:
    """To rounding for few rows, to the bit for many."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).to(DTYPE)
    x = torch.randn(1, rows, 64).to(DTYPE)
    with torch.inference_mode():
        packed, plain = PackedLinear(linear)(x), linear(x)
    assert torch.allclose(packed, plain, rtol=2**-7)
    assert rows <= FEW_ROWS or torch.equal(packed, plain)


class Block(nn.Module):
    """Layers as attention and MLP have them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        sizes = {"q_proj": 96, "k_proj": 32, "v_proj": 32, "gate_proj": 64, "up_proj": 64}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(64, size, bias=bias))
        self.o_proj = nn.Linear(96, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        read = [getattr(self, name)(x) for name in names]
        out_of_turn = [self.v_proj(x), self.q_proj(x), self.k_proj(x + 1), self.v_proj(x + 1)]
        return [*read, *out_of_turn, self.o_proj(read[0])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 100, FEW_ROWS + 1])
def test_layers_that_read_the_same_rows_are_one_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    block = Block(bias).to(DTYPE)
    x = torch.randn(1, rows, 64).to(DTYPE)
    with torch.inference_mode():
        plain = block(x)
        assert pack_layers(block) == 6
        packed = block(x)
    assert block.q_proj.group is block.v_proj.group is not block.up_proj.group
    for ours, theirs in zip(packed, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-6, atol=2**-7)


def llama_layer() -> nn.Module:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    torch.manual_seed(0)
    layer = nn.ModuleDict({"mlp": LlamaMLP(config), "norm": LlamaRMSNorm(64)})
    nn.init.normal_(layer["norm"].weight)
    return layer.to(DTYPE)


@pytest.mark.parametrize("rows", [1, 8, 100, FEW_ROWS + 1])
def test_gates_and_norms_of_few_rows_take_one_call(rows: int) -> None:
    stock, ours = llama_layer(), llama_layer()
    assert pack_layers(ours) == 3
    x = torch.randn(1, rows, 64).to(DTYPE)
    with torch.inference_mode():
        for name in ("mlp", "norm"):
            given, expected = ours[name](x), stock[name](x)
            assert torch.allclose(given, expected, rtol=2**-6, atol=2**-6)
            assert rows <= FEW_ROWS or name == "mlp" or torch.equal(given, expected)
    names = set(stock.state_dict())
    assert set(ours.state_dict()) == names


@pytest.mark.skipif(isinstance(load_library(), str), reason="no native kernels")
def test_a_norm_that_only_looks_like_one_stays() -> None:
    class OnePlus(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * (1 + self.weight)

    model = nn.ModuleDict({"same": LlamaRMSNorm(64), "other": OnePlus(64)}).to(DTYPE)
    pack_layers(model)
    assert "forward" in vars(model["same"]) and "forward" not in vars(model["other"])


def test_a_tied_weight_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.body = nn.Sequential(nn.Linear(8, 8))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().to(DTYPE)
    assert pack_layers(model) == 1
    assert isinstance(model.body[0], PackedLinear)
    assert type(model.head) is nn.Linear


def test_copies_that_would_fill_the_memory_are_not_made(monkeypatch) -> None:
    monkeypatch.setattr("kvboost.model.fast_layers.memory_bytes", lambda: 1000)
    model = nn.Sequential(nn.Linear(64, 64)).to(DTYPE)
    assert pack_layers(model) == 0
    assert type(model[0]) is nn.Linear
