"""An engine may answer made-up prompts before the first real one."""

from __future__ import annotations

import logging

import pytest

from kvboost import KVBoost
from kvboost.checks.rehearsal import RATIOS
from kvboost.errors import KVBoostError
from support.tiny import make_engine, tiny_model


@pytest.fixture
def engine() -> KVBoost:
    return make_engine(tiny_model("llama"), reuse_moved="always", max_running=4)


def test_steps_of_many_sizes_and_moved_text_run_and_nothing_stays(engine: KVBoost) -> None:
    assert engine.rehearse() > 0
    stats = engine.cache_stats()
    assert {1, 2, 4} <= set(engine.serving_stats()["batch_sizes"])
    assert stats["requests"] == 1 + 2 + 4 + 1 + 2 * len(RATIOS)
    assert stats["moved_tokens"] > len(RATIOS) * 100 and stats["recomputed_tokens"] > 0
    assert stats["chunks"] == 0 and not engine.check_integrity()


def test_a_failure_is_told_and_the_server_starts(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KVBoostError("no memory")

    monkeypatch.setattr(engine, "generate", fail)
    with caplog.at_level(logging.WARNING, "kvboost"):
        engine.rehearse()
    assert "the rehearsal ended early: no memory" in caplog.text
