"""Writes docs/modules.md: every module of KVBoost with the opening of its docstring.

    python scripts/list_modules.py

A test fails as long as the page differs from the tree.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvboost"
PAGE = ROOT / "docs" / "modules.md"
SHORT = 160
"""The most characters of a paragraph that is shown whole."""
INTRODUCTION = """\
# Modules

Every module of `src/kvboost`, in its package, with the opening of its docstring.
[Architecture](architecture.md) says what the packages are for and which may import which.

`python scripts/list_modules.py` writes this page from the code. A test fails if it is out of date.
"""


def opening(path: Path) -> str:
    """How a module's docstring begins: its first paragraph, or only a sentence if it is long."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    text = " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")
    return text if len(text) <= SHORT else re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text)[0]


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    packages = [SOURCE, *sorted(file.parent for file in SOURCE.glob("*/**/__init__.py"))]
    for package in packages:
        about = opening(package / "__init__.py")
        modules = sorted(file for file in package.glob("*.py") if file.name != "__init__.py")
        name = "/".join(("kvboost", *package.relative_to(SOURCE).parts))
        parts.append(f"## {name}\n\n{about}\n")
        if modules:
            rows = (f"| `{file.name}` | {opening(file)} |" for file in modules)
            parts.append("\n".join(["| module | |", "| --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
