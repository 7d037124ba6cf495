"""A package that can be imported as vLLM and has every name, but no content."""

from __future__ import annotations

from pathlib import Path

_SOURCE = """
import importlib.abc, importlib.machinery, sys, types

class Thing:
    device_type = "cuda"
    def __init__(self, *given): pass

class Module(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__") or name == "%(missing)s":
            raise AttributeError(name)
        return type(name, (Thing,), {})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("vllm.") and not name.endswith(".%(missing)s"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        pass

print("vLLM prints when it is imported")
sys.meta_path.insert(0, Finder())
"""


def make_fake_vllm(folder: Path, version: str, *, package: str = "vllm", missing: str = "") -> None:
    """Puts it into ``folder``, installed as ``package``; the name ``missing`` is nowhere in it."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(_SOURCE % {"missing": missing})
    about = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
