"""Getting between an engine and its forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.model.execution.forward import Forward


def intercept(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Any]
) -> None:
    """From now on every forward over buffers is ``instead(run, segments, cache)``, which calls
    ``run(segments, cache)`` where the rows shall be computed."""
    intercept_forward(engine.model.forward, monkeypatch, instead)


def intercept_forward(
    forward: Forward, monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Any]
) -> None:
    run = forward._run
    monkeypatch.setattr(forward, "_run", lambda segments, cache: instead(run, segments, cache))


def count_forwards(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of segments of each forward from now on."""
    sizes: list[int] = []

    def counted(run: Any, segments: Any, cache: Any) -> Any:
        sizes.append(len(segments))
        return run(segments, cache)

    intercept_forward(forward, monkeypatch, counted)
    return sizes
