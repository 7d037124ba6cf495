from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost import ConfigError
from kvboost.bench.quality.tasks import Asking, Change, Completion, SummaryQuestion, choose
from kvboost.bench.texts.questions import make_questions


def test_functions_are_completed_after_their_file_and_its_imports() -> None:
    chosen = choose(Asking(task="code", limit=120, passages=5))
    assert len({one.question for one in chosen}) == 120
    for number, one in enumerate(chosen):
        assert isinstance(one, Completion) and len(one.passages) == 5
        assert one.passages[-1].startswith(f"# file: {one.function.path}\n")
        assert one.begun == f"```python\n{one.function.head}"
        assert (
            one.function.has_doctest
            if number < 20
            else one.function.has_doctest or not one.can_tell
        )
        assert not any(one.function.source in text for text in one.passages)
        assert one.function.name in one.ask


def test_a_completion_is_right_if_its_doctest_passes() -> None:
    median = next(
        one for one in choose(Asking(task="code")) if one.question == "code: statistics.median"
    )
    assert isinstance(median, Completion)
    right = f"{median.function.body}```"
    assert median.check(right, is_whole=True) == (True, True)
    assert median.check("    return data[0]\n```", is_whole=True) == (True, False)
    assert median.check("    return (data\n```", is_whole=True) == (False, False)
    half = median.function.body[:-20]  # without the last line it parses
    assert median.check(half, is_whole=False) == (True, False)


def test_nothing_is_said_of_a_doctest_that_the_library_itself_does_not_pass() -> None:
    counter = next(
        one for one in choose(Asking(task="code")) if one.question.endswith("Counter.__init__")
    )
    assert isinstance(counter, Completion)
    assert counter.check(counter.function.body, is_whole=True) == (True, None)
    assert counter.check("    return (", is_whole=True) == (False, None)


def test_an_edit_is_right_if_nothing_else_has_changed() -> None:
    chosen = choose(Asking(task="edit", passages=4, limit=100))
    assert len({one.question for one in chosen}) == len(chosen) == 100
    for one in chosen:
        assert isinstance(one, Change) and len(one.passages) == 4
        assert sum(one.edit.code.splitlines()[0] in text for text in one.passages) == 1
        assert f"Rename {one.edit.old} to {one.edit.new} in {one.edit.function.name} " in one.ask
        right = one.edit.edited.removeprefix(one.edit.first_line)
        assert one.check(f"{right}```", is_whole=True) == (True, True)
        assert one.check(f"{right}    # a comment\n", is_whole=True) == (True, True)
        old = one.edit.code.removeprefix(one.edit.code.partition("\n")[0] + "\n")
        assert one.check(f"{old}```", is_whole=True) == (True, False)


def test_passages_of_a_dataset_are_summarized_or_docstrings(tmp_path: Path) -> None:
    (made,) = make_questions(1)
    row = {
        "question": made.question,
        "answers": made.answers,
        "passages": [{"text": text} for text in made.passages],
    }
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(row))
    (one,) = choose(Asking(task="summary", datasets=(str(path),)))
    assert isinstance(one, SummaryQuestion) and one.passages == made.passages
    assert made.question not in one.ask and one.check("x", is_whole=True) == (None, None)
    assert one.likeness("a b c d", "a b x d") == 0.75
    first, second = choose(Asking(task="summary", limit=2, passages=3))
    assert len(first.passages) == len(second.passages) == 3 and first.passages != second.passages
    with pytest.raises(ConfigError, match=r"--task summary"):
        choose(Asking(task="code", datasets=(str(path),)))


def test_answers_are_as_long_as_their_task_needs() -> None:
    assert Asking().longest_answer == 16 and Asking(task="edit").longest_answer == 128
    assert Asking(task="edit", answer_tokens=9).longest_answer == 9
    with pytest.raises(ConfigError, match=r"limit=9999: only \d+ functions for edit fit"):
        choose(Asking(task="edit", limit=9999))


def test_a_part_of_a_task_is_every_so_manieth() -> None:
    whole, part = (choose(Asking(task="edit", limit=4, part=part)) for part in ("1/1", "2/2"))
    assert part == whole[1::2]
