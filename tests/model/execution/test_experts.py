"""Whose experts run: ours while an engine is bound, and afterwards those that ran before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.model.execution.experts import NAME, Experts, mixed
from support.families import family_model
from support.tiny import tiny_model


def of(model: Any) -> str | None:
    found: str | None = model.config._experts_implementation
    return found


def test_several_engines_of_one_model_give_its_experts_back() -> None:
    model = family_model("qwen3_moe")
    before = of(model)
    first, second = Experts(model), Experts(model)
    first.bind()
    assert of(model) == NAME
    second.release()  # as a new engine does
    assert of(model) == before
    second.bind()
    with second.as_stock():
        assert of(model) == before
    assert of(model) == NAME
    first.release()
    second.release()
    assert of(model) == before


def test_parts_of_a_model_that_ran_others_get_these_back() -> None:
    model = family_model("qwen3_moe")
    layer = model.model.layers[1].mlp.experts
    layer.config = type(layer.config)(**layer.config.to_dict())
    layer.config._experts_implementation = "eager"
    experts = Experts(model)
    experts.bind()
    assert {of(model), layer.config._experts_implementation} == {NAME}
    experts.release()
    assert layer.config._experts_implementation == "eager" and of(model) != NAME


@pytest.mark.parametrize("lacks", ["has_gate", "plain"])
def test_models_with_experts_of_other_kinds_are_left_alone(lacks: str) -> None:
    model = family_model("qwen3_moe")
    assert Experts(model).are_known
    module = model.model.layers[0].mlp.experts
    if lacks == "has_gate":
        module.has_gate = False
    else:
        module.down_proj.data = module.down_proj.data.to(torch.float64)
    assert not Experts(model).are_known
    assert not Experts(tiny_model("llama")).are_known


def test_gradients_go_through_transformers_products() -> None:
    module = family_model("qwen3_moe").model.layers[0].mlp.experts
    rows = torch.randn(3, module.config.hidden_size, requires_grad=True)
    shares, chosen = torch.rand(3, module.num_experts).topk(2)
    mixed(module, rows, chosen, shares).sum().backward()
    assert rows.grad is not None
