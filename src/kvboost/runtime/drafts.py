"""The drafts of one answer: rows that are computed before their tokens are picked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from kvboost.config import LIMIT_DRAFTED
from kvboost.model.execution.sampling import Picked
from kvboost.runtime.computing import Given
from kvboost.runtime.request import RequestState
from kvboost.runtime.speculation.speculation import Speculator
from kvboost.structured.grammars import Constraint
from kvboost.tokens.images import num_text


class Drafts:
    """Tokens that may follow, whose rows are in place, each with the logits after it. The rows from
    the first other token on are never attended to: those of the tokens that do follow replace
    them."""

    def __init__(self, state: RequestState) -> None:
        self.speculator: Speculator | None = None
        """What drafts; None if nothing does."""
        self._state = state
        self._rows: deque[tuple[int, Given]] = deque()

    def hold(self, token_ids: Sequence[int], after: torch.Tensor | Sequence[Picked]) -> None:
        """``after``: the logits after each token, ``[tokens, vocab]``, or the tokens picked from
        them."""
        self._rows.extend(zip(token_ids, after, strict=True))

    def confirm(self) -> tuple[int, Given | None]:
        """How many of the answer's tokens without rows were drafted, and the logits after the last
        of them, or the token picked from these; None if some of the tokens were not drafted."""
        if not self._rows:
            return 0, None
        state = self._state
        confirmed, logits = 0, None
        for token in state.token_ids[state.rows - len(state.request.token_ids) :]:
            drafted, logits = self._rows.popleft() if self._rows else (None, None)
            if drafted != token:
                self._rows.clear()
                logits = None
                break
            confirmed += 1
        state.accepted_tokens += confirmed
        return confirmed, logits

    def draft(
        self,
        rows: int,
        limit: int,
        constraint: Constraint | None,
        switches_at: Callable[[int], bool],
    ) -> list[int]:
        """Tokens to run after the last ``rows`` of the answer: no more than it may still get after
        the next one if it has ``limit`` at most, and none from a position on at which the rotation
        changes."""
        if self.speculator is None or self.speculator.rests():
            return []
        state = self._state
        self.speculator.follow()
        end = len(state.request.token_ids) + len(state.token_ids)
        most = min(limit - len(state.token_ids) - 1, LIMIT_DRAFTED)
        most = next((count for count in range(most) if switches_at(end + count)), most)
        allowed = len if constraint is None else constraint.num_allowed

        def may_follow(tokens: list[int]) -> int:
            return allowed(tokens[: num_text(tokens)])

        drafted = self.speculator.draft(rows, most, may_follow) if most > 0 else []
        state.drafted_tokens += len(drafted)
        return drafted
