"""Which texts are the next turn of a conversation."""

from __future__ import annotations

import pytest

from kvboost.runtime.idle_work import Trail, leading_to
from kvboost.tokens.hashing import as_token_ids
from support.prompts import words

TEMPLATE = words(1, 8)
"""What opens an answer; in the history it is different."""
SYSTEM, QUESTION, ANSWER, NEXT = words(2, 300), words(5, 60), words(6, 20), words(7, 40)
RESULTS = [words(10 + number, 100) for number in range(4)]
PROMPT = [*SYSTEM, *RESULTS[0], *RESULTS[1], *RESULTS[2], *QUESTION, *TEMPLATE]


def leads_to(text: list[int], prompt: list[int] = PROMPT, answer: list[int] = ANSWER) -> bool:
    trail = Trail(as_token_ids([*prompt, *answer]), len(prompt))
    unlike = Trail(as_token_ids(words(99, 200)), 150)
    found = leading_to([unlike, trail], as_token_ids(text))
    assert 0 not in found
    return found == [1]


@pytest.mark.parametrize(
    "text",
    [
        [*PROMPT, *ANSWER, *NEXT],
        [*PROMPT, *ANSWER],
        [*PROMPT[:-8], *words(8, 9), *NEXT],  # its answer and the template are written otherwise
        [*words(9, 5), *PROMPT[3:], *NEXT],  # an edit at the front
        [*SYSTEM, *words(9, 8), *RESULTS[1], *RESULTS[2], *QUESTION, *NEXT],  # a result is cleared
        [*SYSTEM, *RESULTS[0], *words(9, 90), *RESULTS[1], *RESULTS[2], *QUESTION, *NEXT],
    ],
    ids=["continued", "asked again", "template", "front", "cleared", "inserted"],
)
def test_a_turn_leads_to_the_next_one(text) -> None:
    assert leads_to(text)


@pytest.mark.parametrize(
    "text",
    [
        [*SYSTEM, *RESULTS[0], *words(9, 60), *TEMPLATE],  # the same agent, another task
        [*PROMPT[:-68], *words(9, 60), *TEMPLATE],  # the last message is another one
        [*words(9, 400), *RESULTS[2], *QUESTION, *TEMPLATE],  # the same question about other texts
        [*QUESTION, *RESULTS[2], *RESULTS[1], *RESULTS[0], *SYSTEM],  # another order
        PROMPT[:400],  # an earlier turn
        [],
    ],
    ids=["task", "message", "documents", "order", "earlier", "nothing"],
)
def test_other_conversations_are_no_next_turn(text) -> None:
    assert not leads_to(text)


def test_a_short_turn_leads_to_texts_that_begin_with_it() -> None:
    assert leads_to([1, 2, 3, 4, 5], [1, 2], [3])
    assert not leads_to([1, 2, 4, 5], [1, 2], [3])


def test_a_window_may_occur_often() -> None:
    assert leads_to([*words(3, 7), *[5] * 200, *NEXT], [5] * 100)
