"""Edits of code."""

from __future__ import annotations

import ast

from kvboost.bench.texts.edits import edits


def test_every_function_with_a_name_of_its_own_makes_an_edit() -> None:
    assert len({edit.function for edit in edits()}) == len(edits()) > 200
    for edit in edits():
        before, after = (ast.parse(code) for code in (edit.code, edit.edited))
        names, renamed = ([ast.dump(one) for one in ast.walk(tree)] for tree in (before, after))
        assert names != renamed and len(names) == len(renamed)
        assert lines(edit.code) in lines(edit.in_file(100))


def lines(code: str) -> str:
    """Without indentation."""
    return "\n".join(line.strip() for line in code.splitlines())
