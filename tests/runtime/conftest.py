"""Engines whose requests run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.runtime import scheduler, sharing
from support.tiny import make_engine, tiny_model


@pytest.fixture
def share_short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_SHARED", 32)
    monkeypatch.setattr(sharing, "GRID", 16)


@pytest.fixture
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for another one that reads the same text."""
    monkeypatch.setattr(scheduler, "LEAST_SHARED", 1 << 30)


@pytest.fixture
def make() -> Iterator[Callable[..., KVBoost]]:
    made: list[KVBoost] = []

    def make(name: str = "llama", **config: Any) -> KVBoost:
        made.append(make_engine(tiny_model(name), **config))
        return made[-1]

    yield make
    for engine in made:
        assert engine.serving_stats()["kv_bytes"] == 0
        assert engine.check_integrity() == []
        engine.close()
