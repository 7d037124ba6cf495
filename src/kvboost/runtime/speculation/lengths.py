"""How many tokens to draft: as many as give the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The lengths of drafts. Few of them, so that forwards have few sizes whose time must be known."""
LONGEST = LENGTHS[-1]
WORTHWHILE = 1.03
"""A draft must promise this many times the tokens per second of a step without one."""
SURE = 0.8
"""In a batch, every row takes time from the others, and estimates are rough: tokens that are
accepted less often than this are not drafted there."""


@dataclass(frozen=True)
class Pace:
    """How long a draft to run, and what it promises: tokens of all requests per second, relative to
    a step without a draft."""

    length: int
    gain: float


NO_DRAFT = Pace(0, 1.0)


def best_pace(
    chance: float,
    most: int,
    step: Callable[[int], float],
    other_tokens: int = 0,
    drafting: float = 0.0,
) -> Pace:
    """The best length up to ``most`` of a draft whose tokens are accepted with ``chance`` each.
    ``step(length)`` is the time of a step with a draft of that length, ``drafting`` the time that
    one drafted token takes, ``other_tokens`` what the step gives other requests."""
    if other_tokens and chance < SURE:
        return NO_DRAFT
    plain = (other_tokens + 1) / step(0)
    best, expected = NO_DRAFT, 1.0
    for length in range(1, min(most, LONGEST) + 1):
        expected += chance**length
        if length not in LENGTHS:
            continue
        gain = (other_tokens + expected) / (step(length) + length * drafting) / plain
        if gain > max(best.gain, WORTHWHILE):
            best = Pace(length, gain)
    return best
