"""Keeps what transformers finds out about installed files whenever it is imported.

It reads all files of all of its models to learn which names they export, twice, and the lists of
files of all packages. That is the same every time, so it is kept in

    $KVBOOST_HOME/imports/DIGEST.json

where the digest changes with what is installed. A transformers that is being edited, outside of
``site-packages``, is read as ever.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from kvboost.config import home

Structure = dict[frozenset[str], dict[str, set[str]]]
"""The names that modules export, by what must be installed for them."""
Find = Callable[..., Structure]
PACKAGES = ("site-packages", "dist-packages")


def import_quickly(execute: Callable[[], None], name: str) -> None:
    """Executes transformers' module ``name`` for imports, which looks into the home folder first
    from now on."""
    stock = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = functools.partial(_packages, stock)
    try:
        execute()
    finally:
        importlib.metadata.packages_distributions = stock
    keep_structures(sys.modules[name])


def _packages(find: Callable[[], Mapping[str, list[str]]]) -> Mapping[str, list[str]]:
    """The packages that top-level modules belong to. Installing or removing one changes the folder
    that it is in."""
    folders = [path for path in map(Path, sys.path) if path.is_dir()]
    kept = _kept_as(sys.version, *((str(path), _stamp(path)) for path in folders))
    try:
        known: dict[str, list[str]] = json.loads(kept.read_text())
        return known
    except (OSError, ValueError):
        found = find()
        _keep(kept, found)
        return found


def keep_structures(import_utils: ModuleType) -> None:
    """Makes transformers look into the home folder first."""
    find: Find | None = getattr(import_utils, "define_import_structure", None)
    if find is None:
        return

    @functools.lru_cache
    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Structure:
        kept = _file_for(Path(module_path), prefix)
        if kept is None:
            return find(module_path, prefix)
        try:
            return _decoded(json.loads(kept.read_text()))
        except (OSError, ValueError, TypeError, AttributeError):
            found = find(module_path, prefix)
            _keep(kept, _encoded(found))
            return found

    import_utils.define_import_structure = define_import_structure  # type: ignore[attr-defined]


def _file_for(path: Path, prefix: str | None) -> Path | None:
    """Where the structure of all models is kept; None for other parts, which are small."""
    folder = path if path.is_dir() else path.parent
    if folder.name != "models" or not set(PACKAGES) & set(folder.parts):
        return None
    stamps = [_stamp(each) for each in (folder, folder / "__init__.py", folder.parent)]
    return _kept_as(str(path), prefix, stamps)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when a file is written, or when one is added to a folder or removed."""
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _kept_as(*identity: object) -> Path:
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    return home() / "imports" / f"{digest}.json"


def _decoded(kept: list[tuple[list[str], dict[str, list[str]]]]) -> Structure:
    return {
        frozenset(needs): {module: set(names) for module, names in modules.items()}
        for needs, modules in kept
    }


def _encoded(found: Structure) -> list[tuple[list[str], dict[str, list[str]]]]:
    return [
        (sorted(needs), {module: sorted(names) for module, names in modules.items()})
        for needs, modules in found.items()
    ]


def _keep(file: Path, found: object) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
            json.dump(found, scratch)
        os.replace(scratch.name, file)
    except OSError:
        return  # it is found again next time
