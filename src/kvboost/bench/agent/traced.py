"""The prompts of recorded sessions, and how much of each its session had sent before.

Both counts are the bench's own, over token ids of the model's tokenizer, whatever servers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from kvboost.bench.texts.trace import Session, spread

WINDOW = 64
"""Text counts as known elsewhere if so many tokens in a row were sent before."""
Ids = npt.NDArray[np.uint64]
_WEIGHTS = np.random.default_rng(0).integers(1 << 63, size=WINDOW, dtype=np.uint64) * 2 + 1


@dataclass(frozen=True)
class Prompt:
    """A request that is sent."""

    line: int
    """Where the trace has it."""
    text: str
    tokens: int
    prefix_tokens: int
    """Those at its front with which an earlier prompt of the session or its answer begins, but for
    the last token, which is always computed. An ideal prefix cache finds these."""
    elsewhere_tokens: int
    """Those of the others that the session has sent or received before, in windows of 64 tokens."""
    answer: str = ""
    """The recorded answer, unless the model's context has no room for it."""

    @property
    def ideal_tokens(self) -> int:
        """Those that an ideal prefix cache computes."""
        return self.tokens - self.prefix_tokens

    @property
    def can_move(self) -> bool:
        return self.elsewhere_tokens >= WINDOW


@dataclass(frozen=True)
class Traced:
    """A session as it is sent."""

    kind: str
    name: str
    prompts: tuple[Prompt, ...]
    too_long: int
    """Requests that were left out because they have too many tokens."""
    empty: int
    """Requests that were left out because no prompt was recorded."""


def trace_session(session: Session, encode: Callable[[str], list[int]], most: int) -> Traced:
    """Leaves out prompts of more than ``most`` tokens."""
    prompts: list[Prompt] = []
    sent: list[Ids] = []
    windows: set[int] = set()
    too_long = empty = 0
    for request in session.requests:
        ids: Ids = np.asarray(encode(request.text), dtype=np.uint64)
        if not len(ids):
            empty += 1
        elif len(ids) > most:
            too_long += 1
        else:
            found = min(max((_same(ids, one) for one in sent), default=0), len(ids) - 1)
            hashes = _windows(ids)
            elsewhere = _covered(hashes, windows, found, len(ids))
            answered: Ids = np.asarray(encode(request.text + request.answer), dtype=np.uint64)
            has_room = len(answered) <= most
            prompts.append(
                Prompt(
                    request.line,
                    request.text,
                    len(ids),
                    found,
                    elsewhere,
                    request.answer if has_room else "",
                )
            )
            sent.append(ids)
            windows.update(hashes)
            if request.answer and has_room:
                sent.append(answered)
                windows.update(_windows(answered))
    return Traced(session.kind, session.name, tuple(prompts), too_long, empty)


def choose_checked(sessions: Sequence[Traced], count: int, seed: int) -> set[int]:
    """The lines of ``count`` requests that can reuse moved text, spread over the kinds; fewer if
    the sessions have no more."""
    by_kind: dict[str, list[int]] = {}
    for session in sessions:
        lines = [prompt.line for prompt in session.prompts if prompt.can_move]
        by_kind.setdefault(session.kind, []).extend(lines)
    for lines in by_kind.values():
        Random(seed).shuffle(lines)
    return set(spread(list(by_kind.values()))[:count])


def _same(one: Ids, other: Ids) -> int:
    """With how many equal ids both begin."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _windows(ids: Ids) -> list[int]:
    """A hash of each window, in order."""
    if len(ids) < WINDOW:
        return []
    found: list[int] = (np.lib.stride_tricks.sliding_window_view(ids, WINDOW) @ _WEIGHTS).tolist()
    return found


def _covered(hashes: Iterable[int], known: set[int], start: int, end: int) -> int:
    """Rows in ``[start, end - 1)`` that lie in a known window. The last token is computed."""
    covered = 0
    for at, one in enumerate(hashes):
        if one in known:
            upto = min(at + WINDOW, end - 1)
            covered += max(0, upto - max(start, at))
            start = max(start, upto)
    return covered
