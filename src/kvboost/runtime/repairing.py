"""The repair of a prompt with moved spans: its new rows, and the moved ones that are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvboost.model.kv import RequestKV
from kvboost.model.segment import Hook, Segment
from kvboost.reuse.plan import Plan
from kvboost.reuse.repair import STRATEGIES, MovedRows, asks_attention
from kvboost.reuse.rounds import Rounds, asks_stale_answer
from kvboost.reuse.shift import Spans
from kvboost.runtime.computing import Computing
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime


class Repairing:
    """The repair of one request, whose known rows are in place."""

    def __init__(
        self, runtime: Runtime, state: RequestState, kv: RequestKV, num_logits: int
    ) -> None:
        self._runtime, self._state, self._kv = runtime, state, kv
        self._repair = state.request.repair
        self._num_logits = num_logits
        self._rows = runtime.rows_of(kv)
        ids = torch.from_numpy(state.request.token_ids.astype(np.int64))
        self._ids = ids.to(self._rows.device)
        self._stale_answer: torch.Tensor | None = None

    def run(self, plan: Plan) -> Computing[torch.Tensor]:
        """Returns the logits of the prompt's last rows."""
        state, total = self._state, len(self._ids)
        self._kv.reserve(total)
        for unknown in plan.computed():
            self._rows.clear(unknown)
        live_end = total - self._num_logits + 1
        layers = self._kv.shape.num_layers
        moved = MovedRows(plan, live_end, layers, self._rows.device, self._probe)
        rounds = self._choose(moved)
        state.clock.lap("probe")
        logits = yield from self._compute(rounds.rows, rounds.spans)
        if rounds.goes_on(logits[0]):
            logits = yield from self._compute(rounds.rows, rounds.spans)
        state.rows = total
        state.reuse = replace(
            state.reuse,
            strategy=self._repair.strategy,
            recomputed=tuple(rounds.fresh.nonzero()[:, 0].tolist()),
            charged_tokens=moved.charged_tokens,
            charged_flops=moved.charged_flops(self._runtime.model.attention_share),
            expected_kl=rounds.expected_kl,
        )
        state.clock.lap("repair")
        return logits

    def _compute(self, rows: torch.Tensor, spans: Spans | None) -> Computing[torch.Tensor]:
        """Runs ``rows``, ``[prompt]``, and shifts the others of ``spans``. Returns the logits of
        the prompt's last rows."""
        first_logits = len(self._ids) - self._num_logits
        logits, since = [], 0
        # What a slice shifts depends on where it ends, so slices do not depend on the batch.
        for part in torch.split(rows.nonzero()[:, 0], self._slice_rows):
            hook = None
            if spans is not None:
                # A slice shifts the rows between the end of the last slice and its own, once.
                until = int(part[-1]) + 1
                hook = self._rows.shift(part, spans.between(since, until))
                since = until
            num_logits = int((part >= first_logits).sum())
            given = yield Segment(self._kv, self._ids[part], part, num_logits, hook=hook)
            assert isinstance(given, torch.Tensor)
            logits.append(given)
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    @property
    def _slice_rows(self) -> int:
        return min(
            self._runtime.prefill_slice, self._rows.slice_rows or self._runtime.prefill_slice
        )

    def _choose(self, moved: MovedRows) -> Rounds:
        if asks_attention(self._repair):  # a GPU probes while the host goes on
            moved.start_attention(through_all_layers=asks_stale_answer(moved, self._repair))
        spans = moved.spans()
        choice = STRATEGIES[self._repair.strategy](moved, self._repair)
        return Rounds(moved, choice, spans, self._repair, self._stale_answer)

    def _probe(
        self, positions: torch.Tensor, hook: Hook, until: int | None, absent: torch.Tensor | None
    ) -> None:
        hook = self._rows.probe(hook, positions)
        ids, num_logits = self._ids[positions], int(until is None)
        segment = Segment(
            self._kv, ids, positions, num_logits, hook=hook, until=until, absent=absent
        )
        logits = self._runtime.model.forward.run_one(segment)
        if num_logits:
            assert isinstance(logits, torch.Tensor)
            self._stale_answer = logits[-1]
