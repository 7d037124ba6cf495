"""How many tokens to draft: as many as give the most tokens per second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

LENGTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 64)
"""The lengths of drafts, besides the whole of what is offered. Few of them, so that forwards have
few sizes whose time must be known. With the token before them, most are numbers of rows that
kernels multiply at once."""
LONGEST = LENGTHS[-1]
WORTHWHILE = 0.03
"""A draft must add this many tokens to a step."""
MARGIN, MARGIN_BESIDE = 1.1, 1.5
"""It must add this many times the tokens that all requests would get in the time that it takes, and
a longer draft as many times those of the time that it takes more. Beside other requests estimates
are rougher, and what one gets too little all of them lose."""
SURE = 0.6
"""Beside other requests, every row takes time from them: a draft ends there before the first token
that its request gets less often than this, ..."""
CHEAP = 1.6
"""... or less often than this many times what a row costs, in tokens of all requests: where rows
cost nearly nothing, as on a GPU, doubtful tokens may be tried."""


WAITING = 1.3
"""A step with a draft takes at least this many times as long as one that was launched ahead: it
waits for the host."""
LEAVING = 0.5
"""The cost of a draft besides its own step, in steps without a draft, if such a step was launched
ahead and is wasted. It is less than one step: drafts that were right are followed by others."""


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
    *,
    is_ahead: bool = False,
    promised: float = 0.0,
) -> Pace:
    """The best length of a draft whose tokens are accepted with these ``chances``, each if all
    before it were. ``step(length)`` is the time of a step with a draft of that length, ``drafting``
    the time that one drafted token takes, ``other_tokens`` what the step gives other requests.
    ``is_ahead``: a step without a draft was launched before; then ``promised`` are tokens that
    drafts of the other requests would add to a step with drafts."""
    chances, before = chances[:LONGEST], step(0)
    plain, margin = (other_tokens + 1) / before, MARGIN
    if other_tokens and chances:
        rows = max(2, len(chances))
        price = plain * (step(rows) - step(1)) / (rows - 1)  # the first may take a slower path
        chances = _likely(chances, min(SURE, CHEAP * price))
        margin = MARGIN_BESIDE
    best, expected, reached = NO_DRAFT, 1.0, 1.0
    tokens_so_far, seconds_so_far = other_tokens + 1, before  # of a step with the best draft
    for length, chance in enumerate(chances, 1):
        reached *= chance
        expected += reached
        if length not in LENGTHS and length != len(chances):
            continue
        tokens = other_tokens + promised + expected
        seconds = step(length) + length * drafting + (LEAVING * before if is_ahead else 0.0)
        price = tokens_so_far / seconds_so_far * (seconds - seconds_so_far)
        if expected > best.tokens + WORTHWHILE and tokens > tokens_so_far + margin * price:
            best = Pace(length, tokens / seconds / plain, expected)
            tokens_so_far, seconds_so_far = tokens, seconds
    return best


def _likely(chances: Sequence[float], least: float) -> Sequence[float]:
    """Those of the tokens that follow with at least this probability."""
    reached = accumulate(chances, mul)
    return chances[: next((at for at, each in enumerate(reached) if each < least), len(chances))]


def promise(chances: Sequence[float]) -> float:
    """How many tokens of a draft will be accepted."""
    total: float = sum(accumulate(chances, mul))
    return total


FADING = 0.98
"""The factor by which older tokens count less, each time another one is seen."""


class Chances:
    """The share of drafted tokens that were accepted, by kind of draft. Thread-safe. A kind that
    has hardly been seen has the share that ``parent`` knows, or the one that is expected."""

    def __init__(self, weight: float, parent: Chances | None = None) -> None:
        """``weight``: how many tokens the expected share counts for."""
        self._weight = weight
        self._parent = parent
        self._seen: dict[Hashable, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def of(self, kind: Hashable, expected: float) -> float:
        """The chance of the next token of a draft, if all before it were accepted."""
        if self._parent is not None:
            expected = self._parent.of(kind, expected)
        with self._lock:
            accepted, tried = self._seen.get(kind, (0.0, 0.0))
        return (accepted + expected * self._weight) / (tried + self._weight)

    def observe(self, kind: Hashable, accepted: bool) -> None:
        """Learns what became of one token."""
        if self._parent is not None:
            self._parent.observe(kind, accepted)
        with self._lock:
            hits, tried = self._seen.get(kind, (0.0, 0.0))
            self._seen[kind] = hits * FADING + accepted, tried * FADING + 1


LOOKS = ((4, 1), (8, 2), (16, 4))
"""How many looks in vain there may be before the pauses between them become longer, and the steps
from one look to the next until then."""
MOST_STEPS = 8
USEFUL = 1.0
"""Tokens that a draft promises if it was worth the look."""


class Pauses:
    """A request's. On a GPU a step takes little more time than what the host does for it, so what
    repeats nothing is looked up less and less often."""

    def __init__(self) -> None:
        self._in_vain = self._left = self._accepted = 0

    def is_over(self, accepted: int) -> bool:
        """Whether to look before this step; ``accepted`` tokens of drafts are in the answer."""
        if accepted > self._accepted:
            self._accepted = accepted
            self._in_vain = self._left = 0
        self._left -= 1
        return self._left < 0

    def looked(self, promised: float) -> None:
        """Remembers what the look has found."""
        self._in_vain = 0 if promised >= USEFUL else self._in_vain + 1
        steps = next((each for most, each in LOOKS if self._in_vain <= most), MOST_STEPS)
        self._left = steps - 1
