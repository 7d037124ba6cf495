"""Rounds of a repair: prompts whose answer still changes get more rows.

Most prompts are close to a full prefill after the first share of rows, a few are far from it. How
much the distribution of the first token has changed tells them apart: from what the last rows said
over stale text to what they say after the repair, and from round to round.
"""

from __future__ import annotations

import torch

from kvboost.config import MOST_RECOMPUTED, RepairParams
from kvboost.reuse.repair import MovedRows, RepairChoice
from kvboost.reuse.shift import Spans

GROWTH = 2.0
"""Each round makes the recomputed share so many times as large."""
MOST_ABSENT = 0.05
"""If more of the prompt than this is new text before its last rows, what they say without it is no
measure, and there is one round."""


def asks_stale_answer(moved: MovedRows, repair: RepairParams) -> bool:
    """Whether the probe of a repair shall go through all layers, to compare its answer with that of
    the first round. A round that would run the question's rows and hardly any others is none."""
    absent = int(moved.unknown[: moved.tail.start].sum())
    pays = len(moved.tail) <= repair.ratio * moved.plan.num_moved
    return repair.takes_rounds and pays and absent <= MOST_ABSENT * moved.live_end


class Rounds:
    """The rounds of one repair. ``fresh``, ``[prompt]``, are the moved rows that are recomputed so
    far; ``rows``, ``[prompt]``, are those that the next forward runs."""

    def __init__(
        self,
        moved: MovedRows,
        choice: RepairChoice,
        spans: Spans,
        repair: RepairParams,
        stale_answer: torch.Tensor | None,
    ) -> None:
        """``stale_answer``: the logits of the probe, ``[vocab]``, if it has run to the end."""
        self._moved = moved
        self._tolerance = repair.tolerance
        self._before = stale_answer
        self._share = float(choice.rows.sum()) / moved.plan.num_moved
        self.fresh = choice.rows
        self.rows = choice.rows | moved.unknown
        self.spans = spans if choice.shift else None
        moved.charge(choice.rows)

    def goes_on(self, answer: torch.Tensor) -> bool:
        """Whether one more round is needed, given the logits of the prompt's last row, ``[vocab]``,
        after this one. Chooses its rows then."""
        before, self._before = self._before, answer
        if before is None or self.spans is None or self._share >= MOST_RECOMPUTED:
            return False
        if movement(before, answer) <= self._tolerance:
            return False
        self._share = min(GROWTH * self._share, MOST_RECOMPUTED)
        self._choose(round(self._share * self._moved.plan.num_moved) - int(self.fresh.sum()))
        return True

    def _choose(self, num_rows: int) -> None:
        """The next rows by attention. The prompt's last rows are computed again with them."""
        moved = self._moved
        assert self.spans is not None
        self.spans = self.spans.after(self.fresh)
        new = moved.top(moved.attention(), num_rows, without=self.fresh)
        self.fresh = self.fresh | new
        self.rows = new.clone()
        self.rows[moved.tail.start :] = True
        moved.charge(self.rows)


def movement(before: torch.Tensor, after: torch.Tensor) -> float:
    """KL(after || before) of two distributions, given their logits ``[vocab]``."""
    p, q = (logits.float().log_softmax(-1) for logits in (after, before))
    return max(0.0, float((p.exp() * (p - q)).sum()))
