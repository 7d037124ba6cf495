from __future__ import annotations

import pytest

from kvboost.model.execution.caches import observe
from kvboost.model.execution.states import CONV
from kvboost.model.fit.states import layers_with_rows, state_numbers
from support.hybrids import HERE, hybrid_model
from support.tiny import tiny_config


@pytest.mark.parametrize("name", [name for name in HERE if name != "zaya"])
def test_a_config_says_how_large_states_are(name: str) -> None:
    model = hybrid_model(name)
    observed, config = observe(model), model.config.to_dict()
    sizes = {True: 0, False: 0}
    for place, (_, shape) in zip(observed.states.places, observed.states.tensors, strict=True):
        numbers = 1
        for size in shape:
            numbers *= size
        sizes[place.kind == CONV] += numbers
    assert state_numbers(config) == (sizes[True], sizes[False])
    assert layers_with_rows(config) == len(observed.layers)


def test_other_models_have_none() -> None:
    config = tiny_config("llama").to_dict()
    assert (state_numbers(config), layers_with_rows(config)) == (None, None)
    assert state_numbers(hybrid_model("zaya").config.to_dict()) is None
