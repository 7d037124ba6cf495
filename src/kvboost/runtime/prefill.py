"""The prompt of one request: planned, its known rows copied into place, the others computed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from kvboost.cache.chunk import Lineage
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.store import ChunkLost
from kvboost.config import GenerationMode
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.sampling import describe_rows
from kvboost.model.execution.segment import Segment
from kvboost.model.execution.states import RowStates
from kvboost.reuse.copies import further_copies
from kvboost.reuse.driver import repair_rows
from kvboost.reuse.plan import LEAST_TOKENS, Plan
from kvboost.reuse.repair import MovedText, RepairStep
from kvboost.reuse.request import RequestRows
from kvboost.runtime.computing import Computing, await_device
from kvboost.runtime.keeping import Keeping
from kvboost.runtime.planner import Lookup
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.sight import Sight
from kvboost.tokens.hashing import as_token_ids

DESCRIBED_ROWS = 128
"""Rows whose logits are held at a time, if the prompt's tokens are described too."""
YIELD_AFTER_SECONDS = 0.02
"""How long a request of a batch may place rows before it lets the other requests run."""


class Prefill:
    """One request's. Its KV is empty, but for rows that it shares with others."""

    def __init__(
        self,
        runtime: Runtime,
        state: RequestState,
        kv: RequestKV,
        keeping: Keeping,
        live_end: int,
        lookup: Lookup,
        num_shared: int,
    ) -> None:
        """Rows from ``live_end`` on are computed in any case, and the logits of the last row before
        it and of all after it are returned. ``lookup`` is what is known of the prompt; the first
        ``num_shared`` rows are those of a running request."""
        self.runtime, self.state, self.kv = runtime, state, kv
        self.keeping = keeping
        self._request = state.request
        self._live_end = live_end
        self._lookup, self._num_shared = lookup, num_shared
        self.sight = Sight(runtime.model.vision, state)

    def steps(self) -> Computing[torch.Tensor]:
        """All of it. Returns the logits of the prompt's last rows."""
        plan = yield from self.assemble()
        return (yield from (self._repair(plan) if plan.moved else self.compute_rest()))

    def assemble(self) -> Computing[Plan]:
        """Plans the prompt, which ends the lookup, and copies the known rows into place. If a chunk
        turns out to be lost, plans again without it, and without asking the remote store."""
        plan = yield from self._try_to_assemble(self._lookup, self._num_shared)
        while plan is None:
            planner = self.runtime.planner
            again = planner.lookup(self._request, self._live_end, ask_remote=False)
            plan = yield from self._try_to_assemble(again, self.kv.own_start)
        self.state.exact_rows = plan.exact_rows
        if self.kv.states is not None:
            self._mark_states(self.kv.states, plan.num_known)
        return plan

    def _try_to_assemble(
        self, lookup: Lookup, num_shared: int
    ) -> Generator[None, object, Plan | None]:
        """None if a chunk of the plan was lost on the way."""
        runtime, state, clock = self.runtime, self.state, self.state.clock
        store = runtime.store
        with lookup:
            known = lookup.known
            plan, report = runtime.planner.plan(
                self._request, known, self._live_end, num_shared, can_move=self.kv.changes_rows
            )
            approximate = [h for h in plan.in_place if h.chunk.lineage is Lineage.APPROXIMATE]
            copies = further_copies(known.moved, plan.moved, store.fastest_tier)
            more = [hit for copy in copies for hit in copy]
            self.keeping.used = [[*known.exact, *approximate], *(run.hits for run in plan.moved)]
            self.keeping.used += [[hit] for hit in more]
            if any(hit.tier != store.fastest_tier for hit in plan.hits):
                self.keeping.touch_used()  # before these chunks are added to a faster tier
            clock.lap("plan")
            if plan.moved:
                self.kv.prepare_repair()
            try:
                rows = runtime.backend.rows_of(self.kv)
                seconds = yield from self._place(rows, self._not_in_place(plan))
                for number, copy in enumerate(copies, start=2):
                    seconds += yield from self._place(rows, copy, 1 / number)
                rows.finish()
                if not self._has_states(plan):
                    return None
                seconds += clock.lap("assemble")
            except ChunkLost:
                return None
        state.reuse = report
        if plan.moved:
            placed = plan.num_known + sum(hit.num_tokens for hit in more)
            slow = sum(hit.num_tokens for hit in plan.hits if hit.is_slow)
            runtime.cost.observe_place(slow or placed, seconds, slow=slow > 0)
        return plan

    def _has_states(self, plan: Plan) -> bool:
        """Whether a model with states can go on after the known rows. A remote store may have a
        chunk without the states that it should have."""
        end = plan.in_place[-1].end if plan.in_place else 0
        return self.kv.states is None or self.kv.states.is_at(end)

    def _not_in_place(self, plan: Plan) -> Sequence[Hit]:
        """The hits that are not in pages which the request shares with the cache."""
        start = self.kv.own_start
        hits = plan.hits
        if not start or not hits or hits[0].start >= start:
            return hits
        rest = [hit.clip(start, hit.end) for hit in hits if hit.end > start]
        self.runtime.store.count_hits(len(hits) - len(rest))
        return rest

    def _place(
        self, rows: RequestRows, hits: Sequence[Hit], share: float | None = None
    ) -> Generator[None, object, float]:
        """Copies ``hits`` into place, or mixes them with what is there; returns the seconds."""
        state, clock = self.state, self.state.clock
        seconds = since_pause = 0.0
        for hit, data in self.runtime.store.fetch(hits):
            spent = clock.lap("fetch")
            rows.place(hit, data, share)
            spent += clock.lap("assemble")
            seconds += spent
            since_pause += spent
            if state.batched and since_pause > YIELD_AFTER_SECONDS:
                since_pause = 0.0
                yield None
                clock.lap("queue")
        return seconds

    def _mark_states(self, states: RowStates, start: int) -> None:
        """Chooses where states are kept beside the grid: where the prompt leaves text that is
        known, as other prompts may, and before its last token, for the same prompt again. Those at
        the last row that runs are kept in any case."""
        request, last = self._request, len(self._request.token_ids)
        matched = self._lookup.known.matched
        rows = dict.fromkeys((matched, request.cacheable_rows, *request.marks), True)
        if not self.state.reads:
            rows.setdefault(last - 1, False)
        for row, lasts in rows.items():
            if start + LEAST_TOKENS <= row <= last:
                states.mark(row, lasts=lasts)

    def compute_rest(self, *, keep_slices: bool = False) -> Computing[torch.Tensor]:
        """Computes the rest of the prompt, slice by slice. Returns the logits of its last rows."""
        state, ids = self.state, self.sight.token_ids
        described = self._request.params.prompt_logprobs
        state.rows = state.reuse.cached_tokens
        logits = []
        while (start := state.rows) < len(ids):
            end = self._slice_end(start)
            if described is not None and self.keeping.reusable_rows:
                end = self.sight.slice_end(start, min(end, start + DESCRIBED_ROWS))
            num_logits = max(0, end - max(start, self._live_end - 1))
            wanted = num_logits if described is None else end - start
            given = yield from self.compute(range(start, end), wanted)
            if described is not None:
                state.prompt_logprobs += describe_rows(given, ids[start + 1 : end + 1], described)
            logits.append(given[len(given) - num_logits :])
            state.rows = end
            if keep_slices:
                self.keeping.admit()
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def compute(self, positions: range, num_logits: int) -> Computing[torch.Tensor]:
        """Runs the tokens of the prompt, and perhaps of the answer, at ``positions``."""
        self.kv.prepare(positions.start, positions.stop)
        ids = self.sight.token_ids
        if positions.stop > len(ids):
            ids = as_token_ids(np.concatenate([ids, self.state.token_ids]))
        images = yield from self.sight.rows(positions)
        logits = yield Segment(
            self.kv,
            torch.from_numpy(ids[positions.start : positions.stop].astype(np.int64)),
            positions,
            num_logits,
            as_stock=self.as_stock,
            images=images,
            places=self.sight.places(positions),
        )
        assert isinstance(logits, torch.Tensor)
        return logits

    @cached_property
    def as_stock(self) -> bool:
        """Whether a request that runs alone makes stock transformers' calls: if nothing is reused,
        and if the prompt must go through in one piece, which would take too much scratch memory."""
        return self._request.mode is GenerationMode.BASELINE or not self.keeping.reusable_rows

    def _slice_end(self, start: int) -> int:
        """Where the slice that begins at ``start`` ends. Slices bound the memory of one forward,
        and in a batch its time. They end on a fixed grid, so that a hit does not move the later
        slices. If rotation depends on the prompt's length, the model must see it whole."""
        total = len(self._request.token_ids)
        step = total
        if self.keeping.reusable_rows:
            step = self.state.turn.slice_rows or self.runtime.backend.prefill_slice
        if self.kv.most_rows is not None:
            step = min(step, self.kv.most_rows)
        end = min(self.sight.slice_end(start, (start // step + 1) * step), total)
        mark = None if self.kv.states is None else self.kv.states.next_mark(start)
        return end if mark is None else min(end, mark)

    def _repair(self, plan: Plan) -> Computing[torch.Tensor]:
        """Computes the new rows of a prompt with moved spans, together with the moved rows that
        the repair strategy chooses. Returns the logits of the prompt's last rows."""
        runtime, state, repair = self.runtime, self.state, self._request.repair
        ids = torch.from_numpy(self.sight.token_ids.astype(np.int64))
        own = runtime.backend.rows_of(self.kv)
        self.kv.reserve(len(ids))
        for unknown in plan.computed():
            own.clear(unknown)
        moved = MovedText(plan, self._live_end, self.kv.shape.num_layers)
        slice_rows = min(filter(None, (runtime.backend.prefill_slice, own.slice_rows)))
        # The shift takes the numbers of rows for what their keys are rotated by.
        shifted = None if self._request.is_spatial else own
        steps = repair_rows(moved, repair, shifted, slice_rows, together=self.sight.whole)
        given: torch.Tensor | None = None
        before = "repair"
        while True:
            try:
                step = steps.send(given)
            except StopIteration as end:
                chosen, logits = end.value
                break
            state.clock.lap(before)
            before = "repair" if step.probe is None else "probe"
            segment = self._repaired(step, ids, own)
            segment.images = yield from self.sight.rows(step.positions)
            segment.places = self.sight.places(step.positions)
            result = yield segment
            assert isinstance(result, torch.Tensor)
            given = result
            yield from await_device(state, step.is_complete)
        state.rows = len(ids)
        state.reuse = replace(
            state.reuse,
            strategy=repair.strategy,
            recomputed=tuple(np.flatnonzero(chosen).tolist()),
            charged_tokens=moved.charged_tokens,
            charged_flops=moved.charged_flops(runtime.model.attention_share),
        )
        state.clock.lap(before)
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def _repaired(self, step: RepairStep, ids: torch.Tensor, rows: RequestRows) -> Segment:
        """The rows of a step as the forward runs them."""
        positions, probe = step.positions, step.probe
        before = int(np.searchsorted(positions.numpy(), self._live_end - 1))
        return Segment(
            self.kv,
            ids[positions],
            positions,
            len(positions) - before if probe is None else 0,
            hook=step.shift if probe is None else rows.probe(probe, positions),
            until=step.until,
            may_go_on=step.may_go_on,
            absent=step.absent,
        )
