"""Home folders of tests' own, in which nothing has to be compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.config import home


def use_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes ``folder`` the home folder. Its kernels are those of the usual one: their names change
    with their sources, the compiler and the processor."""
    compiled = home() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "native").symlink_to(compiled, target_is_directory=True)
    monkeypatch.setenv("KVBOOST_HOME", str(folder))
