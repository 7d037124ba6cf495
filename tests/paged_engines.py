"""Engines whose requests have pages on any device: on a CPU, Triton's interpreter runs the kernels
and a decode step is the captured function called again."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.model.paged.choose import PagesChoice
from kvboost.model.paged.pool import PagedPool
from kvboost.model.paged.steps import Steps
from tiny import OTHER_MODELS, make_engine, tiny_model

SMALL = {"num_hidden_layers": 2}
"""The interpreter takes its time for every layer."""


def paged_engine(
    monkeypatch: pytest.MonkeyPatch, name: str = "llama", *, pages: bool = True, **config: Any
) -> KVBoost:
    """An engine with pages, or one without."""
    choice = PagesChoice() if pages else PagesChoice("this test compares with buffers")
    monkeypatch.setattr("kvboost.runtime.runtime.choose_pages", lambda *_: choice)
    return make_engine(tiny_model(name, **SMALL), strict=name not in OTHER_MODELS, **config)


def steps_of(engine: KVBoost) -> Steps:
    steps = engine._model.forward.steps
    assert steps is not None, "no request has run in pages"
    return steps


def leaks(engine: KVBoost) -> list[str]:
    pool = engine._runtime.pool
    assert isinstance(pool, PagedPool)
    return pool.slab.check_integrity()
