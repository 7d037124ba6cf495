from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import transformers

from kvboost.model.loading.experts import chosen_share, idle_weights
from support.tiny import make_engine, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("config", "share"),
    [
        (transformers.Qwen3MoeConfig(), Fraction(8, 128)),
        (transformers.GptOssConfig(), Fraction(4, 128)),
        (transformers.MixtralConfig(), Fraction(2, 8)),
        (transformers.DeepseekV3Config(), Fraction(8, 256)),
        (transformers.Ernie4_5_MoeConfig(), Fraction(6, 64)),
        (transformers.LlamaConfig(), Fraction(1)),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_row_goes_through_the_chosen_experts(config, share) -> None:
    assert chosen_share(config) == share


def test_attention_is_weighed_against_what_a_row_goes_through() -> None:
    """A model with twice the experts that chooses as many is no slower per row."""
    models = [tiny_model("mixtral", num_local_experts=number) for number in (4, 8)]
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    active = [size - idle_weights(model) for size, model in zip(sizes, models, strict=True)]
    router = 4 * tiny_config("mixtral").hidden_size * 3
    assert sizes[1] > 1.3 * sizes[0] and active[1] - active[0] == router
    with make_engine(models[0]) as few, make_engine(models[1]) as many:
        assert few.model.attention_share == pytest.approx(many.model.attention_share, rel=0.05)
    numbers = idle_weights(models[0])
    assert idle_weights(models[0], in_bytes=True) == torch.float32.itemsize * numbers
