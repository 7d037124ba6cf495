from __future__ import annotations

import pytest

from kvboost import KVBoost
from kvboost.runtime import runtime


def test_memory_is_returned_after_every_few_requests(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    trimmer = runtime.Trimmer()
    trimmer._trim = lambda pad: given.append(pad) or 0
    monkeypatch.setattr(engine.runtime, "trimmer", trimmer)
    for count in range(1, 2 * runtime.TRIM_EVERY + 1):
        engine.generate([1, 2, 3], 1)
        assert len(given) == count // runtime.TRIM_EVERY


def test_without_malloc_trim_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.sys, "platform", "darwin")
    trimmer = runtime.Trimmer()
    assert trimmer._trim is None
    for _ in range(runtime.TRIM_EVERY):
        trimmer.after_request()


def test_malloc_trim_itself_can_be_called() -> None:
    trimmer = runtime.Trimmer()
    for _ in range(runtime.TRIM_EVERY):
        trimmer.after_request()
