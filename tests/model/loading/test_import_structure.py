"""What transformers finds out about installed files, kept from one process to the next."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvboost.model.loading.import_structure import Structure, import_quickly

FOUND: Structure = {
    frozenset(): {"llama.configuration_llama": {"LlamaConfig"}},
    frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
}


class Utils(ModuleType):
    """transformers' module for imports, newly imported: it counts what it looks up."""

    def __init__(self) -> None:
        super().__init__("utils_for_imports")
        self.asked: list[str] = []
        self.packages: object = None

    def execute(self) -> None:
        self.packages = importlib.metadata.packages_distributions()

    def define_import_structure(self, path: str | Path, prefix: str | None = None) -> Structure:
        self.asked.append(str(path))
        return FOUND


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    return tmp_path / "home"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages" / "transformers" / "models"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder


def imported(monkeypatch: pytest.MonkeyPatch) -> Utils:
    utils = Utils()
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    import_quickly(utils.execute, utils.__name__)
    return utils


def test_models_are_read_once_for_each_installation(
    home: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (models, models / "__init__.py"):
        first, second = imported(monkeypatch), imported(monkeypatch)
        assert first.define_import_structure(place, prefix="models") == FOUND
        assert second.define_import_structure(place, prefix="models") == FOUND
        assert (first.asked, second.asked) == ([str(place)], [])
    (models / "another_model").mkdir()
    third = imported(monkeypatch)
    assert third.define_import_structure(models, prefix="models") == FOUND
    assert third.asked == [str(models)]


def test_other_folders_are_read_as_ever(
    home: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = tmp_path / "checkout" / "models"
    edited.mkdir(parents=True)
    for place in (edited, models.parent):
        for _ in range(2):
            utils = imported(monkeypatch)
            utils.define_import_structure(place)
            assert utils.asked == [str(place)]


def test_packages_are_looked_up_once_until_one_is_installed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    stock = lambda: calls.append(1) or {"yaml": ["PyYAML"]}  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "packages_distributions", stock)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    home.mkdir()
    for _ in range(2):
        assert imported(monkeypatch).packages == {"yaml": ["PyYAML"]}
    assert len(calls) == 1 and importlib.metadata.packages_distributions is stock
    (tmp_path / "new-1.0.dist-info").mkdir()
    imported(monkeypatch)
    assert len(calls) == 2


def test_damaged_files_and_folders_that_cannot_be_written_do_no_harm(
    home: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(monkeypatch).define_import_structure(models)
    for file in (home / "imports").iterdir():
        file.write_text('{"not": "what was kept"}')
    utils = imported(monkeypatch)
    assert utils.define_import_structure(models) == FOUND and utils.asked == [str(models)]
    monkeypatch.setenv("KVBOOST_HOME", str(models / "__init__.py" / "home"))
    utils = imported(monkeypatch)
    assert utils.define_import_structure(models) == FOUND and utils.asked == [str(models)]
