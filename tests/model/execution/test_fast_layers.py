from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from kvboost.model import native
from kvboost.model.execution.fast_layers import (
    FEW_ROWS,
    FrozenLinear,
    PackedLinear,
    can_pack,
    pack_layers,
)
from support.tiny import tiny_model

CPU = torch.device("cpu")
BF16 = torch.bfloat16
needs_bf16 = pytest.mark.skipif(
    not can_pack(CPU, BF16), reason="oneDNN has no bfloat16 on this CPU"
)
needs_amx = pytest.mark.skipif(
    not native.is_available(BF16), reason=f"bfloat16 kernels: {native.why_not(BF16)}"
)
needs_float32 = pytest.mark.skipif(
    not native.is_available(torch.float32),
    reason=f"float32 kernels: {native.why_not(torch.float32)}",
)


def test_only_on_a_cpu_and_for_dtypes_it_multiplies() -> None:
    assert not can_pack(torch.device("meta"), BF16)
    assert not can_pack(torch.device("meta"), torch.float32)
    assert not can_pack(CPU, torch.float16)
    assert can_pack(CPU, torch.float32) == native.is_available(torch.float32)


class Block(nn.Module):
    """The linear layers of attention and an MLP."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        sizes = {"q_proj": 96, "k_proj": 32, "v_proj": 32, "gate_proj": 64, "up_proj": 64}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(64, size, bias=bias))
        self.o_proj = nn.Linear(96, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        read = [getattr(self, name)(x) for name in names]
        another_order = [self.v_proj(x), self.q_proj(x), self.k_proj(x + 1), self.v_proj(x + 1)]
        return [*read, *another_order, self.o_proj(read[0])]


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 100, FEW_ROWS + 1])
def test_layers_that_read_the_same_rows_are_one_product(rows: int, bias: bool) -> None:
    """Equal to plain ones: to rounding for few rows, to the bit for many."""
    torch.manual_seed(0)
    block = Block(bias).to(BF16)
    x = torch.randn(1, rows, 64).to(BF16)
    with torch.inference_mode():
        plain = block(x)
        assert pack_layers(block).num_linears == 6
        packed = block(x)
    assert block.q_proj.group is block.v_proj.group is not block.up_proj.group
    for ours, theirs in zip(packed, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-6, atol=2**-7)
        assert rows <= FEW_ROWS or torch.equal(ours, theirs)


def llama_layer() -> nn.Module:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    torch.manual_seed(0)
    layer = nn.ModuleDict({"mlp": LlamaMLP(config), "norm": LlamaRMSNorm(64)})
    nn.init.normal_(layer["norm"].weight)
    return layer.to(BF16)


@needs_bf16
@pytest.mark.parametrize("rows", [1, 8, 100, FEW_ROWS + 1])
def test_gates_and_norms_of_few_rows_equal_stocks(rows: int) -> None:
    stock, ours = llama_layer(), llama_layer()
    assert pack_layers(ours).num_linears == 3
    x = torch.randn(1, rows, 64).to(BF16)
    with torch.inference_mode():
        for name in ("mlp", "norm"):
            given, expected = ours[name](x), stock[name](x)
            assert torch.allclose(given, expected, rtol=2**-6, atol=2**-6)
            assert rows <= FEW_ROWS or name == "mlp" or torch.equal(given, expected)
    names = set(stock.state_dict())
    assert set(ours.state_dict()) == names


@needs_amx
def test_a_norm_that_computes_something_else_stays() -> None:
    class OnePlus(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * (1 + self.weight)

    model = nn.ModuleDict({"same": LlamaRMSNorm(64), "other": OnePlus(64)}).to(BF16)
    assert pack_layers(model).norms == {model["same"]}
    assert "forward" in vars(model["same"]) and "forward" not in vars(model["other"])


@needs_bf16
def test_a_tied_weight_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.body = nn.Sequential(nn.Linear(8, 8))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().to(BF16)
    assert pack_layers(model).num_linears == 1
    assert isinstance(model.body[0], PackedLinear)
    assert type(model.head) is nn.Linear


@needs_float32
def test_float32_layers_make_stocks_own_calls() -> None:
    """Only whole decoder layers are replaced, later; what was packed is recorded for them."""
    stock, ours = (tiny_model("llama", hidden_size=128, head_dim=32) for _ in range(2))
    packed = pack_layers(ours)
    layers = ours.model.layers
    assert packed.num_linears == 7 * len(layers)
    assert len(packed.products) == 4 * len(layers) and len(packed.norms) == 2 * len(layers)
    assert all(type(layer.self_attn.q_proj) is FrozenLinear for layer in layers)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, stock(ids).logits)
    assert set(ours.state_dict()) == set(stock.state_dict())


@needs_float32
def test_float32_layers_of_other_sizes_are_not_packed() -> None:
    model = tiny_model("llama", hidden_size=128, head_dim=32, intermediate_size=100)
    assert pack_layers(model).num_linears == 0
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_no_copies_if_they_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.model.execution.fast_layers.memory_bytes", lambda: 1000)
    model = nn.Sequential(nn.Linear(64, 64))
    assert pack_layers(model).num_linears == 0
    assert type(model[0]) is nn.Linear
