"""Getting between an engine and its forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost


def intercept(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Any]
) -> None:
    """From now on every forward over buffers is ``instead(run, segments, cache)``, which calls
    ``run(segments, cache)`` where the rows shall be computed."""
    forward = engine.model.forward
    run = forward._run
    monkeypatch.setattr(forward, "_run", lambda segments, cache: instead(run, segments, cache))
