"""Small bugs put into Python functions: one place of the source changes, the rest stays.

Each kind is a mistake people make and a reader can see: a condition the wrong way round, the wrong
operator, a bound that is off by one, arguments in the wrong order. Found in the syntax tree and
written into the text at the node's own place, so that formatting and comments stay as they are.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = {
    "comparison": "a comparison is the wrong way round",
    "condition": "a condition is the opposite of what it should be",
    "operator": "an arithmetic operator is the wrong one",
    "constant": "a number is off by one",
    "arguments": "two arguments of a call are in the wrong order",
    "logic": "an 'and' should be an 'or', or the other way round",
    "result": "True is returned for False, or the other way round",
}

_COMPARISONS = {
    "<": ">=",
    ">": "<=",
    "<=": ">",
    ">=": "<",
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
_OPERATORS = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "<<": ">>", ">>": "<<"}
_LOGIC = {"and": "or", "or": "and"}


@dataclass(frozen=True)
class Mutation:
    """``source`` is the whole function with the bug in it."""

    kind: str
    source: str
    before: str
    """The line as it was."""
    after: str
    """The line as it is now."""


def mutations(source: str) -> list[Mutation]:
    """Every bug that can be put into a function, in the order of its text. ``source`` is one
    function, not indented. What does not compile, or means the same, is left out."""
    tree = ast.parse(source)
    places = _Places(source)
    original = ast.dump(tree)
    found, seen = [], {source}
    for kind, start, end, text in sorted(_changes(tree, places), key=lambda one: one[1:]):
        changed = source[:start] + text + source[end:]
        if changed in seen or not _works(changed, original):
            continue
        seen.add(changed)
        found.append(Mutation(kind, changed, _line(source, start), _line(changed, start)))
    return found


def _works(source: str, original: str) -> bool:
    try:
        compile(source, "<mutation>", "exec")
    except (SyntaxError, ValueError):
        return False
    return ast.dump(ast.parse(source)) != original


def _line(source: str, at: int) -> str:
    return source[source.rfind("\n", 0, at) + 1 :].partition("\n")[0].strip()


class _Places:
    """Where nodes stand in the text. The tree counts bytes within lines, we count characters."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._at(node.lineno, node.col_offset)
        return start, self._at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end]


Change = tuple[str, int, int, str]
"""Kind, ``[start, end)`` of the text, and what is put there."""


def _changes(tree: ast.Module, places: _Places) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _between("comparison", node.left, node.comparators[0], _COMPARISONS, places)
        elif isinstance(node, ast.BinOp) and not _is_text(node):
            yield from _between("operator", node.left, node.right, _OPERATORS, places)
        elif isinstance(node, ast.BoolOp):
            yield from _between("logic", node.values[0], node.values[1], _LOGIC, places)
        elif isinstance(node, ast.Call):
            yield from _swapped(node, places)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, bool):
                yield "result", *places.span(node.value), str(not node.value.value)
        elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Constant):
            yield "condition", *places.span(node.test), _negated(node.test, places)
        elif isinstance(node, ast.Subscript):
            yield from _off_by_one(node.slice, places)
        if isinstance(node, ast.Compare | ast.BinOp):
            others = node.comparators if isinstance(node, ast.Compare) else [node.right]
            for other in others:
                yield from _off_by_one(other, places)


def _between(
    kind: str, left: ast.expr, right: ast.expr, swaps: dict[str, str], places: _Places
) -> Iterator[Change]:
    """The operator between two nodes, unless a comment or a line's end is there too."""
    start, end = places.span(left)[1], places.span(right)[0]
    between = places.source[start:end]
    found = re.fullmatch(r"([\s)]*)([^\s()]+(?: [a-z]+)?)([\s(]*)", between)
    if found and found[2] in swaps and "\n" not in between:
        yield kind, start + found.start(2), start + found.end(2), swaps[found[2]]


def _swapped(node: ast.Call, places: _Places) -> Iterator[Change]:
    if len(node.args) < 2 or any(isinstance(one, ast.Starred) for one in node.args[:2]):
        return
    if isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "print"):
        return  # the order hardly matters
    first, second = (places.span(one) for one in node.args[:2])
    between = places.source[first[1] : second[0]]
    text = places.text(node.args[1]) + between + places.text(node.args[0])
    if "\n" not in text:
        yield "arguments", first[0], second[1], text


def _negated(test: ast.expr, places: _Places) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return places.text(test.operand)
    text = places.text(test)
    simple = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return f"not {text}" if simple else f"not ({text})"


def _off_by_one(node: ast.expr, places: _Places) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 100:
        yield "constant", *places.span(node), str(node.value + 1)


def _is_text(node: ast.BinOp) -> bool:
    """Whether this formats or joins text: another operator would not be a bug one makes."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )


@dataclass(frozen=True)
class Function:
    """A function of a module, on its own."""

    name: str
    source: str


def functions(source: str, *, least_lines: int = 4, most_lines: int = 22) -> list[Function]:
    """The functions and methods of a module that are neither tiny nor long and say in a docstring
    what they do, in the order of the text, without their decorators and indentation."""
    lines = source.splitlines()
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    nodes = [
        node
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")
    ]
    found: dict[str, Function] = {}
    for node in sorted(nodes, key=lambda node: node.lineno):
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        if not least_lines <= length <= most_lines or ast.get_docstring(node) is None:
            continue
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        try:
            ast.parse(text)
        except SyntaxError:  # a string whose lines are not indented
            continue
        found.setdefault(node.name, Function(node.name, text))
    return list(found.values())
