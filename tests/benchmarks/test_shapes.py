"""Random models in the shapes of real ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shapes import config_of, random_model, step_bytes


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
