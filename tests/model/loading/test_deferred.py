"""Stand-ins for functions that are imported when they are called."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from kvboost.model.loading import deferred

COMMAND = """
import sys
from kvboost.cli import app
app(["models"], standalone_mode=False)
assert "torch" not in sys.modules and "transformers" not in sys.modules
import kvboost.engine
late = "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "triton"
assert not set(late) & set(sys.modules), set(late) & set(sys.modules)
assert "torch" in sys.modules and "transformers" in sys.modules
"""
LIBRARY = """
import sys
finders = list(sys.meta_path)
import kvboost, kvboost.model
assert finders == sys.meta_path
"""


as_listed = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 22),
    reason="older releases import other names, so less is deferred",
)


@as_listed
@pytest.mark.parametrize("program", [COMMAND, LIBRARY], ids=["command", "library"])
def test_commands_defer_imports_and_the_library_leaves_them_alone(program: str) -> None:
    """Deferred are torch's compiler and distributed tensors."""
    environment = {k: v for k, v in os.environ.items() if k != "KVBOOST_DEFER_IMPORTS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


@as_listed
def test_there_is_everything_that_stand_ins_are_for() -> None:
    for module, names in deferred.FUNCTIONS.items():
        real = importlib.import_module(module)
        assert all(callable(getattr(real, name)) for name in names)
    compiler = importlib.import_module(deferred.COMPILER)
    assert all(callable(getattr(compiler, mark)) for mark in deferred.MARKS)


COMPILER = """
marked = []
def allow_in_graph(function):
    marked.append(function.__name__)
    return function
def disable(function, reason=None):
    marked.append((function.__name__, reason))
    return lambda *args: ("disabled", *args)
other = 7
"""
FUNCTIONS = "def double(x):\n    return 2 * x\nclass Pair:\n    pass\nHALF = 0.5\n"
IMPORTER = """
import sys
import late_compiler
from late_functions import double, Pair
@late_compiler.allow_in_graph
def marked(): return "marked"
@late_compiler.disable(reason="slow")
def slow(x): return x
without = "late_functions" in sys.modules and not hasattr(sys.modules["late_functions"], "__file__")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Small modules in the places of torch's compiler, of functions and of what imports them."""
    for name, text in (("compiler", COMPILER), ("functions", FUNCTIONS), ("importer", IMPORTER)):
        (tmp_path / f"late_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(deferred, "COMPILER", "late_compiler")
    monkeypatch.setattr(deferred, "IMPORTERS", ("late_importer",))
    monkeypatch.setattr(deferred, "FUNCTIONS", {"late_functions": ("double", "Pair")})
    monkeypatch.setattr(sys, "meta_path", [deferred._Finder(), *sys.meta_path])
    yield tmp_path
    for name in ("late_compiler", "late_functions", "late_importer"):
        sys.modules.pop(name, None)


def test_functions_are_imported_when_they_are_called(folder: Path) -> None:
    importer = importlib.import_module("late_importer")
    assert importer.without and "late_functions" not in sys.modules
    assert importer.double(4) == 8
    functions = sys.modules["late_functions"]
    assert functions.HALF == 0.5 and isinstance(importer.Pair(), functions.Pair)


def test_marks_are_set_when_the_compiler_is_imported(folder: Path) -> None:
    importer = importlib.import_module("late_importer")
    assert "late_compiler" not in sys.modules
    assert importer.marked() == "marked" and importer.slow(1) == 1
    compiler = importlib.import_module("late_compiler")
    assert compiler.marked == ["marked", ("slow", "slow")]
    assert importer.slow(1) == ("disabled", 1) and importer.slow.__name__ == "slow"


def test_what_is_not_listed_is_imported_at_once(folder: Path) -> None:
    (folder / "late_importer.py").write_text("from late_functions import HALF, double\n")
    importer = importlib.import_module("late_importer")
    assert importer.HALF == 0.5 and "late_functions" in sys.modules
    (folder / "late_importer.py").write_text("import late_compiler\nseven = late_compiler.other\n")
    importlib.invalidate_caches()
    del sys.modules["late_importer"]
    assert importlib.import_module("late_importer").seven == 7


def test_an_import_that_needs_more_than_stand_ins_have_is_made_as_ever(folder: Path) -> None:
    (folder / "late_functions.py").unlink()
    package = folder / "late_functions"
    package.mkdir()
    (package / "__init__.py").write_text(FUNCTIONS)
    (package / "part.py").write_text("three = 3\n")
    (folder / "late_importer.py").write_text("from late_functions.part import three\n")
    assert importlib.import_module("late_importer").three == 3
    sys.modules.pop("late_functions.part")


def test_the_environment_decides_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, deferred.COMPILER, raising=False)
    monkeypatch.setenv("KVBOOST_DEFER_IMPORTS", "0")
    deferred.install(own_process=True)
    monkeypatch.delenv("KVBOOST_DEFER_IMPORTS")
    deferred.install()
    assert sys.meta_path == []
    monkeypatch.setenv("KVBOOST_DEFER_IMPORTS", "1")
    deferred.install()
    deferred.install(own_process=True)
    assert len(sys.meta_path) == 1
