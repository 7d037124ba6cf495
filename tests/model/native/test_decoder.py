"""Whole layers in one call, against the model's own layers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvboost.model.execution.fast_layers import can_pack, pack_layers
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Rules, Segment
from kvboost.model.native import decoder
from kvboost.model.native.decoder import MOST_NARROW_ROWS, MOST_ROWS, restore_forward
from support.kernel_forms import CPU, SIZES, close, each_dtype

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "halved": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 128}),
}


def make(name: str, dtype: torch.dtype, **more: object) -> PreTrainedModel:
    kind, config, own = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **own, **more})).to(dtype).eval()
    for parameter in model.parameters():  # biases begin as zeros, norms as ones
        if parameter.ndim == 1:
            parameter.data += torch.randn(parameter.shape).to(parameter.dtype) * 0.2
    return model.bfloat16().to(dtype) if name == "halved" else model


def forward_of(model: PreTrainedModel) -> Forward:
    assert can_pack(CPU, model.dtype)
    return Forward(model, packed=True, fast_layers=pack_layers(model))


def is_native(model: PreTrainedModel) -> list[bool]:
    return ["forward" in vars(layer) for layer in model.model.layers]


class Notes(Hook):
    """A hook that records what it sees."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.seen += [keys.clone(), values.clone()]

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        self.seen += [query.clone(), torch.tensor(rules.scale)]


def run(forward: Forward, hook: Notes | None, until: int | None = None) -> list[torch.Tensor]:
    """A prompt, then a batch of everything; all logits and all rows."""
    kvs = [RequestKV(forward.shape, 300) for _ in range(3)]
    ids = torch.arange(300) % 120
    logits = [
        forward([Segment(kv, ids[:n], range(n), 1)])
        for kv, n in zip(kvs, (70, 5, 200), strict=True)
    ]
    if until is not None:
        forward([Segment(kvs[0], ids[70:90], range(70, 90), 0, hook=hook, until=until)])
    else:
        gaps = torch.tensor([3, 4, 50, 199, 200])
        batch = [
            Segment(kvs[0], ids[70:90], range(70, 90), 20, hook=hook),
            Segment(kvs[1], ids[5:6], range(5, 6)),
            Segment(kvs[2], ids[gaps], gaps, 2),
        ]
        logits.append(forward(batch))
    return [*logits, *(kv.data for kv in kvs)]


@each_dtype
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("hooked", [False, True])
def test_our_layers_equal_the_models_own(dtype: torch.dtype, name: str, hooked: bool) -> None:
    model = make(name, dtype)
    packed = pack_layers(model)
    num_products = len(packed.products)
    assert num_products == 4 * SIZES["num_hidden_layers"] + (dtype == torch.bfloat16)  # lm_head
    is_halved = name == "halved" and dtype == torch.float32  # weights of 16 bits, kept as such
    assert {product.is_halved for product in packed.products.values()} == {is_halved}
    forward = Forward(model, packed=True, fast_layers=packed)
    assert all(is_native(model))
    ours, theirs = Notes(), Notes()
    given = run(forward, ours if hooked else None)
    for layer in model.model.layers:
        restore_forward(layer)
    expected = run(forward, theirs if hooked else None)
    for mine, reference in zip([*given, *ours.seen], [*expected, *theirs.seen], strict=True):
        assert close(mine, reference, 5)
    assert not hooked or len(ours.seen) == 4 * SIZES["num_hidden_layers"]


@each_dtype
def test_a_probe_ends_in_its_layer(dtype: torch.dtype) -> None:
    forward = forward_of(make("llama", dtype))
    notes = Notes()
    run(forward, notes, until=1)
    assert len(notes.seen) == 8


@each_dtype
@pytest.mark.parametrize("narrow", [64, 0])
def test_a_whole_prompt_as_stock_runs_the_models_own_layers(
    dtype: torch.dtype, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do more rows than our layers are faster for; in wide layers these are fewer."""
    monkeypatch.setattr(decoder, "NARROW", narrow)
    model = make("llama", dtype)
    forward = forward_of(model)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    kv = RequestKV(forward.shape, 700)
    ids = torch.zeros(600, dtype=torch.long)
    few = MOST_NARROW_ROWS if narrow else MOST_ROWS
    few = few if dtype == torch.float32 else 600
    forward([Segment(kv, ids[:few], range(1, few + 1))])
    assert not calls
    fast = forward([Segment(kv, ids[:few], range(few))])
    assert not calls
    stock = forward([Segment(kv, ids[:few], range(few), as_stock=True)])
    assert len(calls) == SIZES["num_hidden_layers"]
    assert close(fast, stock, 5)
    calls.clear()
    many = forward([Segment(kv, ids, range(600))])
    assert bool(calls) == (few < 600)
    assert close(many, forward([Segment(kv, ids, range(600), as_stock=True)]), 5)
    calls.clear()
    forward([Segment(kv, ids[:1], range(600, 601), as_stock=True)])  # a decode step
    assert bool(calls) == (dtype == torch.float32)


@each_dtype
def test_layers_of_another_kind_are_left_alone(dtype: torch.dtype) -> None:
    windowed = make("mistral", dtype, sliding_window=32)
    forward_of(windowed)
    assert not any(is_native(windowed))


@each_dtype
def test_layers_that_do_something_else_are_left_alone(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama", dtype)
    packed = pack_layers(model)
    for layer in model.model.layers:
        # The kernels know nothing of this hook; comparing the logits shows it.
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, out: out * 5)
    Forward(model, packed=True, fast_layers=packed)
    assert not any(is_native(model))
    assert "left alone" in caplog.text
