from __future__ import annotations

from pathlib import Path

from kvboost.config import home


def test_home_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("KVBOOST_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert home() == Path("/xdg/kvboost")
