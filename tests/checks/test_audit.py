from __future__ import annotations

import time

import pytest

from test_reuse import HEADER, PASSAGES, prompt_of
from tiny import make_engine, tiny_model


def audited(fraction: float, **config):
    engine = make_engine(tiny_model("llama"), audit_fraction=fraction, **config)
    for passage in PASSAGES:
        engine.warm([*HEADER, *passage])
    return engine


def test_answers_over_moved_text_are_compared_with_a_full_prefill() -> None:
    with audited(1.0, recompute_strategy="none") as engine:
        engine.generate(prompt_of([3, 1]), 12, keep=False)
        engine.generate(prompt_of([0]), 3)  # nothing moved: nothing to audit
        engine.audit()
        stats = engine.cache_stats()["audit"]
        assert stats["audited"] == 1 and stats["waiting"] == 0
        assert stats["mean_kl"] > 1e-6 and stats["max_kl"] >= stats["mean_kl"]
        assert stats["first_token_agreement"] in (0.0, 1.0)


def test_recomputing_everything_audits_to_nothing() -> None:
    with audited(1.0, recompute_strategy="query", recompute_ratio=1.0) as engine:
        engine.generate(prompt_of([3, 1]), 12, keep=False)
        engine.audit()
        assert engine.cache_stats()["audit"]["mean_kl"] == pytest.approx(0.0, abs=1e-6)


def test_audits_run_by_themselves_when_the_engine_is_idle(monkeypatch) -> None:
    monkeypatch.setattr("kvboost.checks.audit.IDLE_SECONDS", 0.01)
    with audited(1.0, recompute_strategy="none") as engine:
        engine.generate(prompt_of([3, 1]), 2, keep=False)
        for _ in range(200):
            if engine.cache_stats()["audit"]["audited"]:
                break
            time.sleep(0.05)
        assert engine.cache_stats()["audit"]["audited"] == 1


def test_only_the_given_fraction_is_audited() -> None:
    with audited(0.25, recompute_strategy="none") as engine:
        for _ in range(24):
            engine.generate(prompt_of([3, 1]), 1, keep=False)
            engine.audit()
        assert 1 <= engine.cache_stats()["audit"]["audited"] <= 14


def test_an_engine_closes_while_audits_wait() -> None:
    engine = audited(1.0, recompute_strategy="none")
    engine.generate(prompt_of([3, 1]), 2, keep=False)
    engine.close()
    assert engine.cache_stats()["audit"]["waiting"] == 0
