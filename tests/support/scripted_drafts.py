"""Drafters that draft what a test says, and as many tokens as it allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvboost import KVBoost
from kvboost.runtime.speculation import speculation
from kvboost.runtime.speculation.drafters import Kind, Offer
from kvboost.runtime.speculation.lengths import Pace
from support.tiny import VOCAB

Script = Callable[[list[int], int], list[int]]
"""The tokens to draft, given those of the right answer, and how many of these there are already."""


def oracle(answer: list[int], seen: int) -> list[int]:
    return answer[seen:]


def always_wrong(answer: list[int], seen: int) -> list[int]:
    return [(token + 1) % VOCAB for token in answer[seen:]]


def at_random(answer: list[int], seen: int) -> list[int]:
    """Wrong at some places, and beyond the end of the answer."""
    chance = random.Random(seen)
    more = [*answer[seen:], *[7] * 8]
    return [token if chance.random() < 0.7 else chance.randrange(VOCAB) for token in more]


class Scripted:
    def __init__(self, answer: list[int], script: Script) -> None:
        self._answer, self._script = answer, script
        self._seen: list[int] = []
        self._offered: list[int] = []

    def push(self, token_ids: Sequence[int]) -> None:
        self._seen += token_ids

    def offer(self, most: int) -> Offer | None:
        self._offered = self._script(self._answer, len(self._seen))[:most]
        return Offer([Kind("scripted", 0.5)] * len(self._offered)) if self._offered else None

    def draft(self, count: int) -> list[int]:
        return self._offered[:count]

    def foresees(self) -> list[int]:
        return []


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is as long as it may be, whatever it costs."""
    monkeypatch.setattr(speculation, "best_pace", lambda chances, *_, **__: Pace(len(chances), 2.0))


def script(
    monkeypatch: pytest.MonkeyPatch, engine: KVBoost, answers: dict[bytes, list[int]], how: Script
) -> None:
    """Drafts by ``how`` from the right answers, which are found by the bytes of their prompts."""
    always_draft(monkeypatch)
    monkeypatch.setattr(
        engine.runtime.speculation,
        "make_drafters",
        lambda request, _: [Scripted(answers[request.token_ids.tobytes()], how)],
    )
