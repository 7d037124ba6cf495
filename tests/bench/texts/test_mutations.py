from __future__ import annotations

import ast
import difflib
import heapq
import inspect
import shlex
import textwrap

import pytest

from kvboost.bench.texts.mutations import KINDS, functions, mutations


def made(source: str, kind: str) -> list[str]:
    """The lines that bugs of a kind leave behind."""
    return [one.after for one in mutations(textwrap.dedent(source)) if one.kind == kind]


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        ("comparison", "return a < b", ["return a >= b"]),
        ("comparison", "return a not in b", ["return a in b"]),
        ("comparison", "return (a) is not (b)", ["return (a) is (b)"]),
        ("operator", "return a + b", ["return a - b"]),
        ("operator", "return a // b", ["return a * b"]),
        ("constant", "return a[0]", ["return a[1]"]),
        ("constant", "return a == 9", ["return a == 10"]),
        ("arguments", "return f(a, b)", ["return f(b, a)"]),
        ("logic", "return a and b", ["return a or b"]),
        ("result", "return True", ["return False"]),
        ("condition", "while a(b): pass", ["while not a(b): pass"]),
        ("condition", "while not a: pass", ["while a: pass"]),
        ("condition", "while a == b: pass", ["while not (a == b): pass"]),
    ],
)
def test_each_kind_of_bug_is_the_mistake_it_says(kind, line, expected) -> None:
    assert made(f"def f(a, b):\n    {line}\n", kind) == expected


@pytest.mark.parametrize(
    "line",
    [
        "return 'a' + 'b'",  # joining text is no arithmetic
        "return max(a, b)",  # the order does not matter
        "return f(*a, b)",
        "return f(a)",
        "return a < b < c",  # nobody could say which of the two is wrong
        "return True or None",  # a constant, but not what is returned
    ],
)
def test_what_would_be_no_visible_bug_is_left_alone(line) -> None:
    source = f"def f(a, b):\n    {line}\n"
    assert {one.kind for one in mutations(source)} <= {"logic"}


@pytest.mark.parametrize("module", [heapq, shlex, textwrap])
def test_a_bug_in_real_code_is_one_line_that_compiles_and_means_something_else(module) -> None:
    found = functions(inspect.getsource(module))
    assert len(found) >= 3
    for function in found:
        for one in mutations(function.source):
            assert one.kind in KINDS
            compile(one.source, function.name, "exec")
            assert ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(function.source))
            before, after = function.source.splitlines(), one.source.splitlines()
            assert len(before) == len(after)
            pairs = zip(before, after, strict=True)
            ((was, is_now),) = [pair for pair in pairs if pair[0] != pair[1]]
            assert (was.strip(), is_now.strip()) == (one.before, one.after)
            assert difflib.SequenceMatcher(None, was, is_now).ratio() > 0.3


def test_places_are_counted_in_characters_where_the_tree_counts_bytes() -> None:
    assert made('def f(a):\n    return "äöü€" in a\n', "comparison") == ['return "äöü€" not in a']


def test_functions_come_without_indentation_and_only_with_a_docstring() -> None:
    source = '''
class Box:
    @property
    def size(self):
        """How large it is."""
        if self.sides:
            return 1
        return 0

    def bare(self):
        a = 1
        b = 2
        return a + b

def tiny():
    """Too short."""
    return 1
'''
    (only,) = functions(source)
    assert only.name == "size"
    assert only.source.startswith('def size(self):\n    """How')
