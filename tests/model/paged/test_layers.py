"""Layers for decode steps: they give what the model's own give, and leave the model as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost.model.paged import layers
from kvboost.model.paged.forward import PagedForward
from kvboost.model.paged.graphs import NoCapture
from kvboost.model.paged.slab import Slab
from support.paged_engines import SMALL, TWO_LAYERS
from support.tiny import DEVICE, make_engine, tiny_model
from support.torch_kernels import use_torch_kernels


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)


def paged_forward(model: PreTrainedModel) -> PagedForward:
    forward = make_engine(model).model.forward
    return PagedForward(forward, Slab(forward.shape, num_pages=4, num_requests=1), NoCapture())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt_oss"])
def test_layers_replace_the_models_own_and_leave_no_trace(name: str) -> None:
    model = tiny_model(name, **TWO_LAYERS)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    paged = paged_forward(model)
    assert paged.layers is not None
    assert paged.layers.note is None and len(paged.layers) == 2
    attention = model.model.layers[0].self_attn
    whole = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == whole
    paged.close()
    assert "forward" not in vars(model.model.layers[0])
    assert attention.k_proj.weight.untyped_storage().data_ptr() != whole
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key])


def test_layers_with_experts_are_compared_before_rounding_chooses_the_experts() -> None:
    model = tiny_model("gpt_oss", **TWO_LAYERS).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.router.weight.data.zero_()  # all are equal
        layer.mlp.router.bias.data.zero_()
    ours = paged_forward(model).layers
    assert ours is not None and len(ours) == 2 and ours.note is None


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "phi3"])
def test_other_layers_are_left_alone(name: str) -> None:
    ours = paged_forward(tiny_model(name, **SMALL)).layers
    assert ours is not None and len(ours) == 0 and "no decoder layers" in str(ours.note)


def test_layers_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "gate", lambda rows, _: rows[:, : rows.shape[1] // 2])
    model = tiny_model("llama", **SMALL)
    ours = paged_forward(model).layers
    assert ours is not None and "were off by" in str(ours.note)
    assert "forward" not in vars(model.model.layers[0])


def test_a_layer_whose_linears_were_replaced_runs_as_it_is() -> None:
    """As an adapter replaces them."""
    layer = tiny_model("llama", **SMALL).model.layers[0]
    ours = layers.FusedLayer(layer, "model.layers.0")
    batch: Any = SimpleNamespace(is_fused=True)
    assert ours.serves(batch, 1)
    layer.mlp.up_proj = nn.Linear(64, 96)
    assert not ours.serves(batch, 1)
