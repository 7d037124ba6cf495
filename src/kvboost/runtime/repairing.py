"""The repair of a prompt with moved spans: its new rows, and the moved ones that are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from kvboost.reuse.driver import Part, ShiftedRows, repair_rows
from kvboost.reuse.plan import Plan
from kvboost.reuse.repair import MovedText, Probe
from kvboost.reuse.shift import Positions, Spans
from kvboost.runtime.computing import Computing, await_device
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.sight import Sight


class _Unshifted:
    """Rows that are not shifted: the shift takes their numbers for what keys are rotated by."""

    def shift(self, positions: Positions, spans: Spans) -> None:
        return None


UNSHIFTED = _Unshifted()


class Repairing:
    """The repair of one request, whose known rows are in place."""

    def __init__(
        self, runtime: Runtime, state: RequestState, kv: RequestKV, num_logits: int, sight: Sight
    ) -> None:
        self._runtime, self._state, self._kv = runtime, state, kv
        self._repair = state.request.repair
        self._num_logits = num_logits
        self._rows = runtime.rows_of(kv)
        self._sight = sight
        self._ids = torch.from_numpy(sight.token_ids.astype(np.int64))

    def run(self, plan: Plan) -> Computing[torch.Tensor]:
        """Returns the logits of the prompt's last rows."""
        state, total = self._state, len(self._ids)
        self._kv.reserve(total)
        for unknown in plan.computed():
            self._rows.clear(unknown)
        live_end = total - self._num_logits + 1
        moved = MovedText(plan, live_end, self._kv.shape.num_layers)
        slice_rows = min(filter(None, (self._runtime.backend.prefill_slice, self._rows.slice_rows)))
        whole = self._sight.whole
        rows: ShiftedRows = UNSHIFTED if state.request.is_spatial else self._rows
        steps = repair_rows(moved, self._repair, rows, slice_rows, together=whole)
        given: torch.Tensor | None = None
        while True:
            try:
                some = steps.send(given)
            except StopIteration as end:
                rounds, logits = end.value
                break
            state.clock.lap("probe" if isinstance(some, Part) else "repair")
            segment = self._segment(some)
            segment.images = yield from self._sight.rows(some.positions)
            segment.places = self._sight.places(some.positions)
            result = yield segment
            assert isinstance(result, torch.Tensor)
            given = result
            if isinstance(some, Probe):
                yield from await_device(state, some.is_complete)
        state.rows = total
        state.reuse = replace(
            state.reuse,
            strategy=self._repair.strategy,
            recomputed=tuple(np.flatnonzero(rounds.fresh).tolist()),
            charged_tokens=moved.charged_tokens,
            charged_flops=moved.charged_flops(self._runtime.model.attention_share),
            expected_kl=rounds.expected_kl,
        )
        state.clock.lap("repair")
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def _segment(self, some: Probe | Part) -> Segment:
        """The rows as the forward runs them."""
        ids, positions = self._ids[some.positions], some.positions
        if isinstance(some, Part):
            first_logits = len(self._ids) - self._num_logits
            num_logits = int((positions >= first_logits).sum())
            return Segment(self._kv, ids, positions, num_logits, hook=some.hook)
        return Segment(
            self._kv,
            ids,
            positions,
            int(some.until is None),
            hook=self._rows.probe(some.hook, positions),
            until=some.until,
            absent=some.absent,
            observes=True,
        )
