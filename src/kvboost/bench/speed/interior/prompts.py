"""Prompts over documents that were read before, with the documents at other places.

read        intro  A B C D E              question
front       intro  A B C D E              question     as it was read: a prefix
middle      other text  A B C D E  other text  question
twice       intro  A B  other text  A B   question     the first time a prefix
reordered   intro  C A E B D              question
header      1 to 40 tokens  A B C D E     question     the number changes every round
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvboost.bench.texts.prompts import MAX_QUESTIONS, Encode, Unread, question

DOCUMENTS = 5
INTRO_TOKENS = 16
OTHER_TOKENS = 48
QUESTION_TOKENS = 32
MOST_HEADER = 40

PLACES = {
    "front": "as they were read, with another question",
    "middle": "in the middle, other text before and after",
    "twice": "two of them twice, other text between",
    "reordered": "in another order",
    "header": "after a header of changing length",
}
INTERIOR = ("middle", "twice", "reordered", "header")
"""Places where a prefix cache is of little use."""


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    known_tokens: int
    """Tokens that were read before, at any place."""


@dataclass(frozen=True)
class Round:
    """New documents, the prompt that reads them, and the prompts that come back to them."""

    read: list[int]
    prompts: Mapping[str, Prompt]


def make_round(encode: Encode, unread: Unread, number: int, document_tokens: int) -> Round:
    """Round ``number``; its text is in no other."""
    documents = [unread.take(document_tokens) for _ in range(DOCUMENTS)]
    intro = unread.take(INTRO_TOKENS)
    together = _join(documents)
    asked = iter(range(len(PLACES) + 1))

    def end() -> list[int]:
        at = number * (len(PLACES) + 1) + next(asked)
        return question(encode, at % MAX_QUESTIONS, QUESTION_TOKENS)

    def other() -> list[int]:
        return unread.take(OTHER_TOKENS)

    pair = _join(documents[:2])
    known, all_known = len(intro) + len(together), len(together)
    make: dict[str, Callable[[], Prompt]] = {
        "front": lambda: Prompt(intro + together + end(), known),
        "middle": lambda: Prompt(other() + together + other() + end(), all_known),
        "twice": lambda: Prompt(intro + pair + other() + pair + end(), len(intro) + 2 * len(pair)),
        "reordered": lambda: Prompt(intro + _join(_another(documents, number)) + end(), known),
        "header": lambda: Prompt(
            unread.take(1 + number * 17 % MOST_HEADER) + together + end(), all_known
        ),
    }
    read = intro + together + end()
    return Round(read, {place: make[place]() for place in PLACES})


def _another(documents: list[list[int]], number: int) -> list[list[int]]:
    """Another order, with another first and another last document."""
    rng = random.Random(number)
    while True:
        order = rng.sample(documents, len(documents))
        if order[0] is not documents[0] and order[-1] is not documents[-1]:
            return order


def _join(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]
