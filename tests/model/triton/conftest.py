from __future__ import annotations

import pytest

from kvboost.model import triton
from support.tiny import DEVICE

if not triton.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted, every program costs time: parts are combined by as few as
    possible, unless a test wants more."""
    if DEVICE == "cpu":
        monkeypatch.setattr("kvboost.model.triton.attention.FEW_COMBINED", 0)
        monkeypatch.setattr("kvboost.model.triton.warm.FEW_COMBINED", 0)
