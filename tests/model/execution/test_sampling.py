from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from kvboost.config import SamplingParams
from kvboost.model.execution.sampling import Sampler, eos_ids, warn_about_defaults

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])


def sample(count=200, logits=LOGITS, defaults=None, prompt=(0,), **params) -> list[int]:
    sampler = Sampler(SamplingParams(**params), defaults or GenerationConfig(), prompt, CPU)
    return [sampler(logits)[0] for _ in range(count)]


def test_greedy_by_default_and_at_temperature_zero() -> None:
    assert set(sample()) == {4}
    assert set(sample(temperature=0, top_p=0.5)) == {4}


def test_a_seed_repeats_and_another_does_not() -> None:
    assert sample(temperature=1.0, seed=3) == sample(temperature=1.0, seed=3)
    assert sample(temperature=1.0, seed=3) != sample(temperature=1.0, seed=4)
    assert sample(temperature=1.0) != sample(temperature=1.0)


def test_requests_do_not_disturb_each_other() -> None:
    alone = sample(temperature=1.0, seed=3, count=20)
    samplers = [
        Sampler(SamplingParams(temperature=1.0, seed=seed), GenerationConfig(), [0], CPU)
        for seed in (3, 9)
    ]
    mixed = [[sampler(LOGITS)[0] for sampler in samplers] for _ in range(20)]
    assert [row[0] for row in mixed] == alone


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert set(sample(top_k=2, seed=0)) == {3, 4}
    assert set(sample(top_p=0.6, seed=0)) == {4}
    assert set(sample(min_p=0.3, seed=0)) == {3, 4}
    assert len(set(sample(do_sample=True, top_k=0, temperature=50.0, seed=0))) == 5


def test_temperature_flattens_and_sharpens() -> None:
    cold = sample(temperature=0.3, seed=0, count=500)
    hot = sample(temperature=3.0, seed=0, count=500)
    assert cold.count(4) > 400 > hot.count(4)


def test_a_penalty_applies_to_prompt_and_answer_greedy_too() -> None:
    assert sample(count=1, prompt=[4], repetition_penalty=2.0) == [3]
    assert sample(count=3, repetition_penalty=5.0, prompt=[0]) == [4, 3, 2]


def test_the_models_generation_config_is_the_default() -> None:
    defaults = GenerationConfig(top_k=1, temperature=0.5, repetition_penalty=1.0)
    assert set(sample(do_sample=True, defaults=defaults)) == {4}
    assert len(set(sample(do_sample=True, defaults=defaults, top_k=5, temperature=9.0))) == 5


def test_logprobs_are_the_models_own() -> None:
    sampler = Sampler(
        SamplingParams(logprobs=2, temperature=5.0, seed=0), GenerationConfig(), [0], CPU
    )
    token, described = sampler(LOGITS)
    expected = torch.log_softmax(LOGITS, 0)
    assert described.token_id == token
    assert described.logprob == pytest.approx(float(expected[token]))
    assert [token_id for token_id, _ in described.top] == [4, 3]
    assert described.top[0][1] == pytest.approx(float(expected[4]))


def test_settings_we_do_not_apply_are_named() -> None:
    with pytest.warns(UserWarning, match="no_repeat_ngram_size"):
        warn_about_defaults(GenerationConfig(no_repeat_ngram_size=3))
    warn_about_defaults(GenerationConfig())


def test_end_of_sequence_is_none_one_or_several() -> None:
    assert eos_ids(GenerationConfig()) == frozenset()
    assert eos_ids(GenerationConfig(eos_token_id=3)) == {3}
    assert eos_ids(GenerationConfig(eos_token_id=[3, 4])) == {3, 4}


def test_a_temperature_close_to_zero_equals_zero() -> None:
    assert set(sample(temperature=1e-300, seed=1)) == set(sample(temperature=1e-40)) == {4}


def test_a_bias_in_whole_numbers() -> None:
    assert set(sample(logit_bias={4: -100, 3: -1})) == {2}
