"""Recognises the next turn of a conversation by its text, also after edits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import numpy as np

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
    """The text of one turn, as far as it takes to know it again: 16 windows of its prompt."""

    def __init__(self, token_ids: TokenIds, num_prompt: int) -> None:
        """``token_ids``: a prompt of ``num_prompt`` tokens and its answer."""
        self.token_ids = token_ids
        last = num_prompt - TEMPLATE_TOKENS - WINDOW
        self.windows: list[int] = []
        if last >= 0:
            starts = np.unique(np.linspace(0, last, NUM_WINDOWS).astype(int))
            chosen = token_ids[starts[:, None] + np.arange(WINDOW)].ravel()
            self.windows = window_polynomials(chosen, WINDOW)[::WINDOW].tolist()

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


def find_places(trails: Iterable[Trail], token_ids: TokenIds) -> Places:
    """Where the windows of ``trails`` first begin in ``token_ids``."""
    hashes = window_polynomials(token_ids, WINDOW)
    windows = np.array(sorted({one for trail in trails for one in trail.windows}), np.uint64)
    if not len(windows):
        return {}
    nearest = windows[np.searchsorted(windows[1:], hashes, side="right")]
    found = np.flatnonzero(nearest == hashes)[::-1]
    return dict(zip(hashes[found].tolist(), found.tolist(), strict=True))
