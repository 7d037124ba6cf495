from __future__ import annotations

import pytest

from kvboost import KVBoost
from kvboost.model.loading import machine
from kvboost.runtime import runtime


def test_memory_is_returned_after_every_few_requests(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(runtime, "release_freed_memory", lambda: given.append(0))
    monkeypatch.setattr(engine.runtime, "trimmer", runtime.Trimmer())
    for count in range(1, 2 * runtime.TRIM_EVERY + 1):
        engine.generate([1, 2, 3], 1)
        assert len(given) == count // runtime.TRIM_EVERY


def test_without_malloc_trim_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: object())
    machine.release_freed_memory()


def test_malloc_trim_itself_can_be_called() -> None:
    machine.release_freed_memory()
