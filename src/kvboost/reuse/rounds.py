"""Rounds of a repair: prompts whose answer is expected to be far off get more rows.

Most prompts are close to a full prefill after the first share of rows, a few are not. Two numbers
tell them apart: how much the first round has changed the distribution of the first token, from what
it was over stale text (a KL), and which share of the error of moved rows is left, as far as the
question attends to them. KL is about quadratic in the error, so the product of the change and the
squared share is the KL to expect.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvboost.config import MOST_RECOMPUTED, RepairParams
from kvboost.reuse.repair import MovedText, RepairChoice
from kvboost.reuse.shift import Spans

GROWTH = 2.0
"""A second round makes the recomputed share at least so many times as large: fewer rows would not
be worth another forward."""
MOST_ABSENT = 0.05
"""If more of the prompt than this is new text before its last rows, what they say without it is no
measure, and there is one round."""


def asks_stale_answer(moved: MovedText, repair: RepairParams) -> bool:
    """Whether the probe of a repair goes through all layers, to compare its answer with that of
    the first round. It does not if the first round would run hardly more than the question."""
    absent = int(moved.unknown[: moved.tail.start].sum())
    pays = len(moved.tail) <= repair.ratio * moved.plan.num_moved
    return repair.takes_rounds and pays and absent <= MOST_ABSENT * moved.live_end


class Rounds:
    """The rounds of one repair, at most two. ``fresh`` are the moved rows that are recomputed so
    far; ``rows`` are those that the next forward runs."""

    def __init__(
        self,
        moved: MovedText,
        choice: RepairChoice,
        spans: Spans,
        repair: RepairParams,
        stale_answer: torch.Tensor | None,
    ) -> None:
        """``stale_answer``: the logits of the probe, ``[vocab]``, if it has run to the end."""
        self._moved = moved
        self._tolerance = 0.0 if repair.tolerance is None else repair.tolerance
        self._stale_answer = stale_answer
        self.expected_kl: float | None = None
        """Of the first token, to a full prefill; None if there is nothing to tell it from."""
        self.fresh = choice.rows
        self.rows = choice.rows | moved.unknown
        self.spans = spans if choice.shift else None
        moved.charge(choice.rows)

    @property
    def may_go_on(self) -> bool:
        """Whether the answer of the first round can tell that one more is needed."""
        return self._stale_answer is not None and self.spans is not None

    def goes_on(self, answer: torch.Tensor) -> bool:
        """Whether one more round is needed, given the logits of the prompt's last row, ``[vocab]``,
        after the first. Chooses its rows then."""
        if not self.may_go_on:
            return False
        assert self._stale_answer is not None
        change = divergence(answer, self._stale_answer)
        self._stale_answer = None
        stale_shares = self._stale_shares()
        num_moved, num_fresh = len(stale_shares) - 1, int(self.fresh.sum())
        self.expected_kl = change * float(stale_shares[num_fresh]) ** 2
        most = round(MOST_RECOMPUTED * num_moved)
        if self.expected_kl <= self._tolerance or num_fresh >= most:
            return False
        enough = int((change * stale_shares**2 > self._tolerance).sum())
        num_rows = min(max(enough, round(GROWTH * num_fresh)), most)
        self.expected_kl = change * float(stale_shares[num_rows]) ** 2
        self._choose(num_rows - num_fresh)
        return True

    def _stale_shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Which share of the expected error of moved rows is left, if so many of them are
        recomputed: ``[moved + 1]``, from 1 to 0."""
        weights = np.sort(self._moved.weights()[self._moved.rows])[::-1]
        covered = weights.cumsum(dtype=np.float64)
        return np.append(1.0, 1 - covered / max(covered[-1], 1e-30))

    def _choose(self, num_rows: int) -> None:
        """The next rows by weight. The rows of the first round, which have attended to rows that
        were stale, and the prompt's last rows are computed again with them."""
        moved = self._moved
        assert self.spans is not None
        self.spans = self.spans.after(self.fresh)
        new = moved.top(moved.weights(), num_rows, without=self.fresh)
        self.fresh = self.fresh | new
        self.rows = self.fresh.copy()
        self.rows[moved.tail.start :] = True
        moved.charge(self.rows)


def divergence(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """KL(expected || actual) of two distributions, given their logits ``[vocab]``."""
    p, q = (logits.float().log_softmax(-1) for logits in (expected, actual))
    return max(0.0, float((p.exp() * (p - q)).sum()))
