from __future__ import annotations

import pytest

from kvboost import KVBoostError
from kvboost.runtime.settings import Lifetime


def test_an_engine_can_be_used_until_it_is_closed() -> None:
    lifetime = Lifetime()
    lifetime.check()
    lifetime.is_over = True
    with pytest.raises(KVBoostError, match="closed"):
        lifetime.check()


def test_a_fork_cannot_use_the_engine_of_its_parent(monkeypatch) -> None:
    lifetime = Lifetime()
    monkeypatch.setattr("os.getpid", lambda: 0)
    assert lifetime.is_elsewhere
    with pytest.raises(KVBoostError, match="process 0 is a fork"):
        lifetime.check()
