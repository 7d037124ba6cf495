"""Functions of the standard library, with their files and what these import."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from kvboost.bench.texts.prompts import pieces, sources


@dataclass(frozen=True)
class Function:
    """A function or method that has a docstring and does something."""

    module: str
    name: str
    """Within its module, such as ``Counter.most_common``."""
    before: str
    """Its file before it."""
    head: str
    """Its signature and docstring, as whole lines without indentation of its own."""
    body: str
    """The rest of it."""

    @property
    def path(self) -> str:
        return path_of(self.module)

    @property
    def source(self) -> str:
        return self.head + self.body

    @property
    def has_doctest(self) -> bool:
        return ">>> " in self.head


def path_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


@cache
def source_of(module: str) -> str | None:
    """The source of a module, which is not imported. None if it has none."""
    try:
        spec = find_spec(module)
        found = spec.loader.get_source(module) if spec and spec.loader else None  # type: ignore[attr-defined]
    except (ImportError, AttributeError):  # not on this platform, or written in C
        return None
    return found or None


@cache
def functions(module: str) -> tuple[Function, ...]:
    """Those of a module and of its classes, without decorated ones, in the order of the file."""
    source = source_of(module)
    assert source is not None, module
    return tuple(_functions(module, source))


def _functions(module: str, source: str) -> Iterator[Function]:
    lines = source.splitlines(keepends=True)
    for name, node in _definitions(ast.parse(source)):
        if node.decorator_list or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        first, end = node.lineno - 1, node.end_lineno
        own = textwrap.dedent("".join(lines[first:end])).splitlines(keepends=True)
        told = (node.body[0].end_lineno or 0) - first
        yield Function(
            module, name, "".join(lines[:first]), "".join(own[:told]), "".join(own[told:])
        )


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


@cache
def imports(module: str) -> tuple[str, ...]:
    """The modules that a module imports and that have a source, in the order of the file."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source_of(module) or "")):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
    return tuple(one for one in found if one != module and source_of(one))


def files_before(function: Function, count: int, characters: int) -> tuple[str, ...]:
    """``count`` excerpts of about so many characters: of the files that its file imports, then of
    its own file before it. If these are too few, of other files."""
    own = list(pieces(function.before, characters))[-max(1, count // 2) :]
    imported = imports(function.module)
    others = [name for name, _ in sources() if name not in (function.module, *imported)]
    heads = [beginning(name, characters) for name in (*imported, *others)]
    return (*heads[: count - len(own)], *(titled(function.module, text) for text in own))


def beginning(module: str, characters: int) -> str:
    """That of a file, of at least so many characters if it has them."""
    source = source_of(module) or ""
    return titled(module, next(pieces(source, characters), source))


def titled(module: str, text: str) -> str:
    """A part of a file, with the file's name above it."""
    return f"# file: {path_of(module)}\n{text}"
