"""Edits of code."""

from __future__ import annotations

from kvboost.bench.texts.edits import EDITS, code_edit, words_as_tokens


def test_an_answer_is_the_code_with_one_name_changed() -> None:
    for number, (function, old, new) in enumerate(EDITS):
        edit = code_edit(number)
        assert function.__name__ in edit.answer and f" {old}," not in edit.answer
        words, edited = words_as_tokens([edit.question, edit.answer], 100)
        assert min(words) == 100 and max(words + edited) < 1000
        asked_for = words_as_tokens([f" {new}", edit.question, edit.answer], 100)
        assert asked_for[2].count(100) > 0, "the new name"
        assert len(set(edited) - set(words)) <= 4, "nearly all words can be drafted"
