from __future__ import annotations

import copy

import torch

from kvboost.model.loading.fingerprint import fingerprint
from kvboost.model.loading.key_scales import fold, unfold
from support.families import family_model
from support.tiny import make_engine


def test_a_folded_model_gives_the_same_logits_and_can_be_given_its_scales_back() -> None:
    model = family_model("hunyuan_v1_dense")
    own = copy.deepcopy(model.state_dict())
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        fold(model)
        fold(model)  # changes nothing
        assert not torch.equal(
            own["model.layers.0.self_attn.query_layernorm.weight"],
            model.model.layers[0].self_attn.query_layernorm.weight,
        )
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)
    unfold(model)
    assert all(torch.equal(one, own[name]) for name, one in model.state_dict().items())


def test_an_engine_gives_a_model_back_as_it_was_and_knows_it_again() -> None:
    model = family_model("hunyuan_v1_dense")
    own = copy.deepcopy(model.state_dict())
    with make_engine(model) as engine:
        engine.generate([5, 6, 7], 2)
        first = engine.model.fingerprint
        with make_engine(model) as other:
            assert other.model.fingerprint == first
            other.generate([5, 6, 7], 2)
    assert all(torch.equal(one, own[name]) for name, one in model.state_dict().items())


def test_stored_keys_are_not_taken_for_those_with_scales() -> None:
    """Earlier versions stored such keys with strict=False."""
    model = family_model("hunyuan_v1_dense")
    with_scales = fingerprint(model, model.config)
    with make_engine(model) as engine:
        assert engine.model.fingerprint != with_scales
