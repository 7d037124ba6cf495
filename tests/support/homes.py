"""Home folders of tests' own, in which nothing has to be compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.config import home


def use_home(monkeypatch: pytest.MonkeyPatch, folder: Path, *, models: bool = False) -> None:
    """Makes ``folder`` the home folder. Its kernels are those of the usual one: their names change
    with their sources, the compiler and the processor. With ``models``, so are its models; what is
    learned about them, such as a tolerance, is not."""
    folder.mkdir(exist_ok=True)
    for shared in ("native", "models") if models else ("native",):
        known = home() / shared
        known.mkdir(parents=True, exist_ok=True)
        (folder / shared).symlink_to(known, target_is_directory=True)
    monkeypatch.setenv("KVBOOST_HOME", str(folder))
