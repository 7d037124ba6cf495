"""Recognises the next turn of a conversation by its text, also after edits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvboost.tokens.hashing import TokenIds, window_polynomials

WINDOW = 32
NUM_WINDOWS = 16
TEMPLATE_TOKENS = 8
"""The end of a prompt, which opens the answer. Chat templates write it differently in the history,
with ``<think>`` for instance."""
LEAST_SHARE = 0.75
"""Less would take the same question about other documents for a next turn."""

Places = Mapping[int, int]
"""Where windows begin in a text, by their hash."""


class Trail:
    """The text of one turn, and 16 windows of its prompt by which to know it again."""

    def __init__(self, token_ids: TokenIds, num_prompt: int) -> None:
        """``token_ids``: a prompt of ``num_prompt`` tokens and its answer."""
        self.token_ids = token_ids
        self._last = num_prompt - TEMPLATE_TOKENS - WINDOW
        end = token_ids[self._last : self._last + WINDOW] if self._last >= 0 else token_ids[:0]
        self.ending: list[int] = window_polynomials(end, WINDOW).tolist()
        """The last window; none if the prompt is shorter than that."""

    @cached_property
    def windows(self) -> list[int]:
        if self._last < 0:
            return []
        starts = np.unique(np.linspace(0, self._last, NUM_WINDOWS).astype(int))
        chosen = self.token_ids[starts[:, None] + np.arange(WINDOW)].ravel()
        windows: list[int] = window_polynomials(chosen, WINDOW)[::WINDOW].tolist()
        return windows

    def leads_to(self, token_ids: TokenIds, places: Places) -> bool:
        """Whether ``token_ids``, with these windows at ``places``, goes on from this turn: it
        begins with the whole turn, or contains the end of its prompt and most of the rest in the
        same order."""
        own = self.token_ids
        if len(own) <= len(token_ids) and np.array_equal(own, token_ids[: len(own)]):
            return True
        if not self.windows or self.windows[-1] not in places:
            return False
        # The longest sequence of places that never falls: ends[i] is the least end of one of i + 1.
        ends: list[int] = []
        for place in (places[window] for window in self.windows if window in places):
            at = bisect_right(ends, place)
            ends[at : at + 1] = [place]
        return len(ends) >= LEAST_SHARE * len(self.windows)


def leading_to(trails: Sequence[Trail], token_ids: TokenIds) -> list[int]:
    """Which of ``trails``, by number, ``token_ids`` goes on from. Most are ruled out by their last
    window: the thread that computes answers asks this at the end of each request."""
    hashes = window_polynomials(token_ids, WINDOW)
    ends = find_places((one for trail in trails for one in trail.ending), hashes)
    near = [n for n, one in enumerate(trails) if not one.ending or one.ending[0] in ends]
    places = find_places((one for n in near for one in trails[n].windows), hashes)
    return [n for n in near if trails[n].leads_to(token_ids, places)]


def find_places(windows: Iterable[int], hashes: npt.NDArray[np.uint64]) -> Places:
    """Where ``windows`` first begin in a text that has windows of these ``hashes``."""
    wanted = np.array(sorted({*windows}), np.uint64)
    if not len(wanted):
        return {}
    nearest = wanted[np.searchsorted(wanted[1:], hashes, side="right")]
    found = np.flatnonzero(nearest == hashes)[::-1]
    return dict(zip(hashes[found].tolist(), found.tolist(), strict=True))
