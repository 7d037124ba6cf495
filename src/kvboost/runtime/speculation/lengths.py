"""How many tokens to draft: as many as give the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LENGTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 64)
"""The lengths of drafts, besides the whole of what is offered. Few of them, so that forwards have
few sizes whose time must be known. With the token before them, most are numbers of rows that
kernels multiply at once."""
LONGEST = LENGTHS[-1]
WORTHWHILE = 1.03
"""A draft must promise this many times the tokens per second of a step without one."""
SURE = 0.75
"""In a batch, rows take time from the other requests, and estimates are rough: where they do, a
draft ends before the first token that is accepted less often than this."""
FREE = 1.15
"""Rows that make a step this many times as long at most take no time from others."""


@dataclass(frozen=True)
class Pace:
    """How long a draft to run, and what it promises."""

    length: int
    gain: float
    """Tokens of all requests per second, relative to a step without a draft."""
    tokens: float = 1.0
    """How many tokens the request may expect of the step."""


NO_DRAFT = Pace(0, 1.0)


def best_pace(
    chances: Sequence[float],
    step: Callable[[int], float],
    other_tokens: float = 0.0,
    drafting: float = 0.0,
) -> Pace:
    """The best length of a draft whose tokens are accepted with these ``chances``, each if all
    before it were. ``step(length)`` is the time of a step with a draft of that length, ``drafting``
    the time that one drafted token takes, ``other_tokens`` what the step gives other requests."""
    chances = chances[:LONGEST]
    if other_tokens and step(len(chances)) > FREE * step(0):
        sure = (count for count, chance in enumerate(chances) if chance < SURE)
        chances = chances[: next(sure, len(chances))]
    plain = (other_tokens + 1) / step(0)
    best, expected, reached = NO_DRAFT, 1.0, 1.0
    for length, chance in enumerate(chances, 1):
        reached *= chance
        expected += reached
        if length not in LENGTHS and length != len(chances):
            continue
        gain = (other_tokens + expected) / (step(length) + length * drafting) / plain
        if gain > max(best.gain, WORTHWHILE):
            best = Pace(length, gain, expected)
    return best
