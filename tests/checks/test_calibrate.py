from __future__ import annotations

import pytest

from kvboost.errors import ConfigError, PromptError
from support.prompts import HEADER, PASSAGES, prompt_of
from support.tiny import make_engine, tiny_model

SAMPLES = [prompt_of([3, 1, 0, 2]), prompt_of([2, 0, 3, 1])]


@pytest.fixture
def warmed():
    with make_engine(tiny_model("llama"), recompute_strategy="query") as engine:
        for passage in PASSAGES:
            engine.warm([*HEADER, *passage])
        yield engine


def test_the_smallest_ratio_that_holds_is_found_and_used(warmed) -> None:
    strict = warmed.calibrate(SAMPLES, max_kl=1e-6)
    assert strict.ratio == 1.0 and strict.steps[-1].mean_kl <= 1e-6
    assert warmed.config.recompute_ratio == 1.0
    loose = warmed.calibrate(SAMPLES, max_kl=strict.steps[1].mean_kl)
    assert loose.ratio <= 0.05
    assert all(step.mean_kl > loose.max_kl for step in loose.steps[:-1])
    charged = [step.charged_share for step in strict.steps]
    assert charged[0] == 0 and charged == sorted(charged)
    result = warmed.generate(SAMPLES[0], 1)
    assert result.recomputed_tokens == round(loose.ratio * result.moved_tokens)


def test_reuse_that_would_not_be_faster_is_calibrated_too(engine) -> None:
    for passage in PASSAGES:
        engine.warm([*HEADER, *passage])
    found = engine.calibrate(SAMPLES[:1], max_kl=0.0)
    assert found.steps[0].mean_kl > 1e-4  # though computing the text would be faster, it was moved
    assert all(step.mean_kl > 0 for step in found.steps[:-1])
    assert found.holds == (found.steps[-1].mean_kl == 0)


def test_strategies_without_a_ratio_are_refused() -> None:
    with (
        make_engine(tiny_model("llama"), recompute_strategy="none") as engine,
        pytest.raises(ConfigError, match="no ratio to calibrate"),
    ):
        engine.calibrate(SAMPLES, max_kl=0.1)


def test_samples_that_reuse_nothing_are_an_error(engine) -> None:
    with pytest.raises(PromptError, match="warm"):
        engine.calibrate(SAMPLES, max_kl=0.1)


def test_nonsense_is_refused(engine) -> None:
    with pytest.raises(PromptError, match="several sample prompts"):
        engine.calibrate([], max_kl=0.1)
    with pytest.raises(ConfigError, match="max_kl=-1"):
        engine.calibrate(SAMPLES, max_kl=-1)
