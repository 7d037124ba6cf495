from __future__ import annotations

from pathlib import Path

from kvboost.config import home, progress_allowed


def test_progress_can_be_switched_off_by_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("KVBOOST_PROGRESS", raising=False)
    assert progress_allowed()
    monkeypatch.setenv("KVBOOST_PROGRESS", "0")
    assert not progress_allowed()


def test_home_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("KVBOOST_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert home() == Path("/xdg/kvboost")
