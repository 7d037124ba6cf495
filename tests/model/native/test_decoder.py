"""Whole layers in one call against the same layers in Python."""

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

from kvboost.model.fast_layers import pack_layers
from kvboost.model.forward import Forward
from kvboost.model.kv import RequestKV
from kvboost.model.native.build import load_library
from kvboost.model.native.decoder import give_back
from kvboost.model.segment import Segment

pytestmark = pytest.mark.skipif(
    isinstance(load_library(), str), reason=f"no native kernels: {load_library()}"
)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 128}),
}


def make(name: str, **more: object) -> PreTrainedModel:
    kind, config, own = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **own, **more})).to(torch.bfloat16).eval()
    for parameter in model.parameters():  # biases begin as zeros, norms as ones
        if parameter.ndim == 1:
            parameter.data += torch.randn(parameter.shape).to(parameter.dtype) * 0.2
    pack_layers(model)
    return model


def is_native(model: PreTrainedModel) -> list[bool]:
    return ["forward" in vars(layer) for layer in model.model.layers]


class Notes:
    """A hook that writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_fresh(self, layer: int, kv: RequestKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.seen += [keys.clone(), values.clone()]

    def on_query(
        self, layer: int, kv: RequestKV, query: torch.Tensor, scale: float, window: int | None
    ) -> None:
        self.seen += [query.clone(), torch.tensor(scale)]


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


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("looked_at", [False, True])
def test_it_is_what_the_layers_do_in_python(name: str, looked_at: bool) -> None:
    model = make(name)
    forward = Forward(model, packed=True)
    assert all(is_native(model))
    ours, theirs = Notes(), Notes()
    given = run(forward, ours if looked_at else None)
    for layer in model.model.layers:
        give_back(layer)
    expected = run(forward, theirs if looked_at else None)
    for one, other in zip([*given, *ours.seen], [*expected, *theirs.seen], strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-5, atol=2**-5)
    assert not looked_at or len(ours.seen) == 4 * SIZES["num_hidden_layers"]


def test_a_look_ends_in_its_layer() -> None:
    forward = Forward(make("llama"), packed=True)
    notes = Notes()
    run(forward, notes, until=1)
    assert len(notes.seen) == 8


def test_a_whole_prompt_by_itself_finds_the_layers_as_they_were() -> None:
    """It makes stock transformers' own calls, unless it need not."""
    model = make("llama")
    forward = Forward(model, packed=True)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    kv = RequestKV(forward.shape, 700)
    ids = torch.zeros(600, dtype=torch.long)
    forward([Segment(kv, ids, range(1, 601))])
    assert not calls
    fast = forward([Segment(kv, ids, range(600), as_stock=False)])
    assert not calls
    stock = forward([Segment(kv, ids, range(600))])
    assert len(calls) == SIZES["num_hidden_layers"]
    assert torch.allclose(fast.float(), stock.float(), rtol=2**-5, atol=2**-5)


def test_layers_that_are_not_of_the_kind_are_left_alone() -> None:
    windowed = make("mistral", sliding_window=32)
    Forward(windowed, packed=True)
    assert not any(is_native(windowed))


def test_layers_that_do_something_else_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3.0
        # The kernels ask the layer for its scale; one that hides it is found out.
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, out: out * 5)
    Forward(model, packed=True)
    assert not any(is_native(model))
    assert "left alone" in caplog.text
