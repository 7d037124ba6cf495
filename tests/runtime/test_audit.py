"""Every answer that is healed is compared with the exact one."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost import ConfigError, KVBoost
from kvboost.results import kl_divergence
from kvboost.runtime.audit import RECORDED_TOKENS, AnswerComparison, TopTokens
from support.healed import SLOPPY, warmed
from support.prompts import BASELINE, MOVED, prompt_of
from support.tiny import DEVICE, make_engine, tiny_model

SHOWN_TOKENS = RECORDED_TOKENS if DEVICE == "cpu" else 1
"""A GPU picks later tokens without showing their logits."""


def make(**config) -> KVBoost:
    return warmed(make_engine(tiny_model("llama"), **config))


def logits_of(seed: int, vocab: int, loud: float = 3.0) -> torch.Tensor:
    return loud * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), st.sampled_from([8, 64, 65, 300]), st.floats(0.0, 1.0))
def test_the_measured_kl_is_never_more_than_that_over_all_tokens(seed, vocab, noise) -> None:
    drawn = logits_of(seed, vocab)
    exact = drawn + noise * logits_of(seed + 1, vocab)
    full = float(kl_divergence(exact[None], drawn[None]))
    measured = TopTokens.of(drawn).kl_from(exact)
    assert -1e-9 <= measured <= full + 1e-5
    if vocab <= 64:  # all tokens are told apart
        assert measured == pytest.approx(full, abs=1e-5)


def test_tokens_are_compared_as_their_logits_come() -> None:
    drawn = [logits_of(seed, 20) for seed in range(3)]
    comparison = AnswerComparison([TopTokens.of(one) for one in drawn], [])
    assert comparison.result() is None and len(comparison) == 3
    other = drawn[1].clone()
    other[int(other.argmin())] = other.max() + 1
    comparison.add(drawn[0][None])
    assert comparison.num_done == 1
    comparison.add(torch.stack([other, drawn[2], drawn[0]]))  # one more than there are tokens
    found = comparison.result()
    assert found.compared_tokens == 3 and found.first_divergence == 1
    assert found.agreement == pytest.approx(2 / 3) and found.mean_kl > 0.01


def test_an_audit_says_what_scoring_with_and_without_reuse_says() -> None:
    with make() as engine:
        prompt = prompt_of([3, 1])
        asked = engine.generate(prompt, 20, **SLOPPY)
        full, moved = (
            engine.score(prompt, asked.token_ids, mode, recompute_strategy="none").logits
            for mode in (BASELINE, MOVED)
        )
        engine.heal()
        audit = asked.healing.audit
        agreed = (full.argmax(-1).cpu() == torch.tensor(asked.token_ids)).tolist()
        assert audit.compared_tokens == 20
        assert audit.agreement == pytest.approx(sum(agreed) / 20) and not all(agreed)
        assert audit.first_divergence == agreed.index(False)
        measured = [TopTokens.of(moved[i]).kl_from(full[i]) for i in range(SHOWN_TOKENS)]
        expected = sum(measured) / SHOWN_TOKENS
        assert audit.mean_kl == pytest.approx(expected, rel=1e-3) and expected > 0.01
        assert expected < kl_divergence(full, moved)[:SHOWN_TOKENS].mean()
        stats = engine.cache_stats()["audit"]
        assert stats["audited"] == 1 and stats["mean_kl"] == stats["max_kl"] == audit.mean_kl
        assert stats["token_agreement"] == pytest.approx(audit.agreement)
        assert stats["same_answers"] == 0.0
        assert stats["first_token_agreement"] == float(agreed[0])


def test_recomputing_everything_audits_to_nothing() -> None:
    with make(recompute_strategy="query", recompute_ratio=1.0) as engine:
        engine.generate(prompt_of([3, 1]), 12, ignore_eos=True)
        engine.heal()
        stats = engine.cache_stats()["audit"]
        assert stats["audited"] == 1 and stats["mean_kl"] == pytest.approx(0.0, abs=1e-6)
        assert stats["token_agreement"] == stats["same_answers"] == 1.0


def test_of_a_sampled_answer_the_first_tokens_are_compared() -> None:
    with make() as engine:
        asked = engine.generate(prompt_of([3, 1]), 24, temperature=2.0, seed=1, **SLOPPY)
        biased = engine.generate(prompt_of([2, 1]), 24, logit_bias={5: 5.0}, **SLOPPY)
        engine.heal()
        for one in (asked, biased):
            assert one.healing.audit.compared_tokens == SHOWN_TOKENS
            assert one.healing.audit.mean_kl > 1e-6


def test_exact_answers_are_not_audited() -> None:
    with make() as engine:
        assert engine.generate(prompt_of([0]), 3).healing is None
        engine.heal()
        stats = engine.cache_stats()["audit"]
        assert stats["audited"] == 0
        assert stats["mean_kl"] is stats["max_kl"] is stats["token_agreement"] is None


def test_answers_that_are_too_far_off_raise_the_ratio(caplog) -> None:
    numbers = itertools.count()
    options = {"recompute_strategy": "query", "ignore_eos": True}
    with make(recompute_ratio=0.1, recompute_strategy="query", max_audit_kl=1e-5) as engine:

        def ask(times: int, **own) -> None:
            for salt in map(str, itertools.islice(numbers, times)):
                warmed(engine, salt)
                engine.generate(prompt_of([3, 1]), 2, cache_salt=salt, **options, **own)
            engine.heal()

        ask(8, recompute_ratio=0.0)  # these chose another ratio, and say nothing about the engine's
        ask(7)
        assert engine.config.recompute_ratio == 0.1
        with caplog.at_level(logging.WARNING, "kvboost"):
            ask(1)
        assert engine.config.recompute_ratio == 0.2 and "recompute_ratio is 0.20" in caplog.text
        ask(8), ask(8), ask(8)
        assert engine.config.recompute_ratio == 1.0
        ask(8)
        assert engine.cache_stats()["audit"]["recompute_ratio"] == 1.0


def test_answers_that_are_close_enough_leave_it() -> None:
    with make(recompute_ratio=0.1, recompute_strategy="query", max_audit_kl=1e5) as engine:
        for number in range(8):
            warmed(engine, str(number))
            engine.generate(prompt_of([3, 1]), 1, cache_salt=str(number))
        engine.heal()
        assert engine.cache_stats()["audit"]["audited"] == 8
        assert engine.config.recompute_ratio == 0.1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_audit_kl": -1.0}, "max_audit_kl=-1.0 must be"),
        ({"max_audit_kl": 0.1, "heal": "off"}, "heal is 'off'"),
        ({"max_audit_kl": 0.1, "recompute_strategy": "none"}, "has none; use 'auto'"),
    ],
)
def test_an_alarm_that_could_do_nothing_is_refused(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(tiny_model("llama"), **config)
