from __future__ import annotations

from collections import Counter

import pytest

from kvboost.bench.texts.bug_questions import (
    EXCERPT_CHARACTERS,
    LEAST_FUNCTIONS,
    NUM_CANDIDATES,
    POOL,
    make_bugs,
    pool,
)
from kvboost.bench.texts.mutations import KINDS
from kvboost.errors import ConfigError

QUESTIONS = make_bugs(96)


def test_the_pool_has_whole_functions_that_can_have_a_bug() -> None:
    assert len(pool()) == POOL
    for excerpt in pool():
        assert len(excerpt.functions) >= LEAST_FUNCTIONS
        assert sum(len(one.source) for one in excerpt.functions) <= EXCERPT_CHARACTERS
        compile(excerpt.text(), excerpt.module, "exec")


def test_one_file_has_the_bug_and_the_others_are_as_they_are() -> None:
    clean = {excerpt.text() for excerpt in pool()}
    for question in QUESTIONS:
        changed = [text for text in question.files if text not in clean]
        assert len(question.files) == 5 and len(changed) == 1
        assert question.mutation.source in changed[0]
        assert changed[0].startswith(f"# file: {question.module.replace('.', '/')}.py\n")


def test_candidates_are_four_functions_that_are_shown_once() -> None:
    for question in QUESTIONS:
        assert len(set(question.candidates)) == NUM_CANDIDATES
        assert question.candidates[question.answer] == question.function
        text = "".join(question.files)
        assert all(text.count(f"def {name}(") == 1 for name in question.candidates)
        told = question.question.replace(question.mutation.before, "")
        assert not any(name in told.split() for name in question.candidates)


def test_files_come_again_and_bugs_do_not() -> None:
    shown = Counter(text for question in QUESTIONS for text in question.files)
    assert shown.most_common(10)[-1][1] > 5
    assert len({one.mutation.source for one in QUESTIONS}) == len(QUESTIONS)
    assert len({one.mutation.kind for one in QUESTIONS}) >= 5
    places = Counter(one.answer for one in QUESTIONS)
    assert min(places[at] for at in range(NUM_CANDIDATES)) > len(QUESTIONS) / 8
    where = {
        next(at for at, text in enumerate(one.files) if one.mutation.source in text)
        for one in QUESTIONS
    }
    assert where == set(range(5))


def test_a_smaller_number_gives_the_first_of_them_and_a_seed_others() -> None:
    assert make_bugs(5) == QUESTIONS[:5]
    assert [one.key for one in make_bugs(5, seed=1)] != [one.key for one in QUESTIONS[:5]]
    assert len({one.key for one in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("hint", ["none", "kind", "line"])
def test_a_hint_tells_what_it_says(hint: str) -> None:
    question = make_bugs(1, hint=hint)[0]
    assert (KINDS[question.mutation.kind] in question.question) == (hint == "kind")
    assert (question.mutation.before in question.question) == (hint == "line")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"hint": "all"}, "hint='all'"), ({"files": 1}, "files=1 must"), ({"size": 500}, "pool=500")],
)
def test_nonsense_is_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_bugs(1, **options)
