"""Healing while a request answers: on a GPU, its decode steps also compute rows of its prompt.

Rows are computed again from the end of the exact prefix on, front to back, in place of those that
the answer began with. When the rest fits into one forward, it runs with the current token as its
last row: from then on, every token is that of exact rows.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.sampling import takes_likeliest
from kvboost.model.execution.segment import Segment
from kvboost.results import Healing
from kvboost.runtime.audit import AnswerComparison
from kvboost.runtime.computing import Computing
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.tokens.hashing import TokenIds, as_token_ids

MOST_ROWS = 512
"""Rows of one forward while it catches up."""


class StepHealing:
    """Heals one request. ``exact_rows`` of its state is the frontier: it moves when rows have been
    computed, so that only exact rows are ever kept or shared as such."""

    def __init__(self, runtime: Runtime, state: RequestState, kv: RequestKV) -> None:
        self._runtime, self._state, self._kv = runtime, state, kv
        self._most = runtime.backend.forward.beside_rows
        self._prompt = state.request.token_ids
        self._began = state.exact_rows
        state.heals = True

    @classmethod
    def of(cls, runtime: Runtime, state: RequestState, kv: RequestKV) -> StepHealing | None:
        """None if there is nothing to heal, or not in this way."""
        request = state.request
        wanted = request.heal == "auto" and request.grammar is None and not state.is_exact
        can = runtime.backend.forward.beside_rows > 0 and kv.runs_ahead
        can = can and request.adapter is None  # which runs no captured forwards
        can = can and request.images is None  # nor do rows of images
        return cls(runtime, state, kv) if wanted and can else None

    @property
    def is_done(self) -> bool:
        return self._state.is_exact

    def rows_beside(self) -> Segment | None:
        """The rows to compute beside the next step, which has time for some; None if there are
        none."""
        if self.is_done:
            return None
        rows = self._next_rows(self._state.exact_rows)
        self._state.accompanied |= rows is not None
        return rows

    def rows_after(self, rows: Segment, end: int) -> Segment | None:
        """The rows to compute beside the step after the next, which computes ``rows``; None if that
        one is to catch up. ``end``: the position after the last token of prompt and answer."""
        return None if end + 1 - rows.end <= self._most else self._next_rows(rows.end)

    def _next_rows(self, start: int) -> Segment | None:
        end = min(start + self._most, len(self._prompt) - 1)
        return self._segment(self._prompt[start:end], start, 0) if start < end else None

    def computed(self, rows: Segment) -> None:
        """Rows that ``rows_beside`` gave are in place."""
        self._state.exact_rows = rows.end

    def catches_up(self, end: int) -> bool:
        """Whether all rows up to ``end`` that are not exact yet run now, if there is time."""
        start = self._state.exact_rows
        is_near = end - start <= self._most or start >= len(self._prompt) - 1
        return not self.is_done and is_near

    def catch_up(self, end: int) -> Computing[torch.Tensor]:
        """Computes them, the current token's row last, and compares the answer so far with what
        exact rows would have given. Returns the logits of the last row, ``[vocab]``."""
        state, answer = self._state, self._state.token_ids
        greedy = takes_likeliest(state.request.params, self._runtime.model.generation_config)
        comparison = AnswerComparison(list(state.recorded), list(answer) if greedy else [])
        first = len(self._prompt) - 1 if len(comparison) else end - 1
        ids = as_token_ids(np.concatenate([self._prompt, answer])[:end])
        state.accompanied = True
        logits: list[torch.Tensor] = []
        start = state.exact_rows
        while start < end:
            stop = min(start + MOST_ROWS, end)
            self._kv.reserve(stop)
            given = yield self._segment(ids[start:stop], start, max(0, stop - max(start, first)))
            assert isinstance(given, torch.Tensor)
            logits.append(given)
            state.exact_rows = start = stop
        after = torch.cat(logits)
        comparison.add(after[:-1])
        healed = end - self._began
        state.rows, state.exact_rows, state.exact_from = end, sys.maxsize, len(answer)
        state.healing = Healing(healed, healed, "done", audit=comparison.result())
        state.recorded.clear()
        state.heals = False
        return after[-1]

    def finish(self, *, is_kept: bool) -> None:
        """The request has ended and what it keeps is kept: counts it, and drops approximate copies
        of its rows. If something was forgotten meanwhile, nothing was kept."""
        runtime, state, request = self._runtime, self._state, self._state.request
        if not is_kept or state.healing is None:
            return
        if state.epoch != runtime.store.epoch:
            state.healing.healed_tokens, state.healing.status = 0, "dropped"
            return
        ids = as_token_ids(np.concatenate([self._prompt, state.token_ids])[: state.rows])
        dropped = runtime.store.drop_superseded(runtime.root_of(request), ids, request.repair.name)
        runtime.idle_work.add_healed(state, dropped)

    def _segment(self, ids: TokenIds, start: int, num_logits: int) -> Segment:
        tensor = torch.from_numpy(ids.astype(np.int64))
        return Segment(self._kv, tensor, range(start, start + len(ids)), num_logits)
