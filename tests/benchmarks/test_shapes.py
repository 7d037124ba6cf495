"""Random models in the shapes of real ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shapes import config_of, pack_randomly, random_model, step_bytes
from support.tiny import tiny_model


@pytest.mark.parametrize(
    ("shape", "parameters", "active"),
    [
        ("7b", 7.6e9, 7.1e9),
        ("gpt-oss-20b", 20.9e9, 3.6e9),
        ("qwen3-30b-a3b", 30.5e9, 3.0e9),
        ("deepseek-v2-lite", 15.7e9, 2.45e9),
    ],
)
def test_a_shape_has_as_many_weights_as_the_model(
    shape: str, parameters: float, active: float
) -> None:
    """A step reads the embedding of one token, and the experts that it chooses."""
    model = random_model(shape, "meta", torch.bfloat16)
    assert model.num_parameters() == pytest.approx(parameters, rel=0.01)
    assert step_bytes(model) / 2 == pytest.approx(active, rel=0.02)
    assert type(model).__name__ == config_of(shape).architectures[0]


def test_experts_in_mxfp4_are_read_as_a_quarter() -> None:
    """A fifth of what a step reads are other weights."""
    plain = random_model("gpt-oss-20b", "meta", torch.bfloat16)
    of_experts = 2 * 3 * 2880 * 2880 * 4 * 24
    expected = step_bytes(plain) - of_experts * (1 - 4.25 / 16)
    assert step_bytes(pack_randomly(plain)) == pytest.approx(expected, rel=0.02)
    assert plain.num_parameters() < 2e9, "the experts are codes"


def test_random_mxfp4_experts_are_as_large_as_plain_ones() -> None:
    model = pack_randomly(tiny_model("gpt_oss").cpu())
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (4, 64, 192)
    assert 0.01 < experts.gate_up_proj.std() < 0.04
    with torch.inference_mode():
        assert model(torch.arange(9)[None]).logits.isfinite().all()
