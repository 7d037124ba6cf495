"""Loads a program of scripts/ or examples/ as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


def load_script(name: str) -> ModuleType:
    return _load(SCRIPTS / f"{name}.py", f"script_{name}")


def load_example(name: str) -> ModuleType:
    return _load(ROOT / "examples" / f"{name}.py", f"example_{name}")


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
