"""Edits of code."""

from __future__ import annotations

import ast

from kvboost.bench.texts.edits import CHOSEN, code_edit, edits, words_as_tokens


def test_an_answer_is_the_code_with_one_name_changed() -> None:
    chosen = CHOSEN.strip().splitlines()
    for number, (line, (function, old, new)) in enumerate(zip(chosen, edits(), strict=False)):
        assert line == f"{function.module} {function.name} {old} {new}"
        edit = code_edit(number)
        assert function.name.split(".")[-1] in edit.answer and f" {old}," not in edit.answer
        words, edited = words_as_tokens([edit.question, edit.answer], 100)
        assert min(words) == 100 and max(words + edited) < 1000
        asked_for = words_as_tokens([f" {new}", edit.question, edit.answer], 100)
        assert asked_for[2].count(100) > 0, "the new name"
        assert len(set(edited) - set(words)) <= 4, "nearly all words can be drafted"


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
