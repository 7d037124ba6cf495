"""The plan of a prompt, and its known rows in place."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvboost.cache.chunk import Lineage
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.store import ChunkLost
from kvboost.model.execution.kv import RequestKV
from kvboost.reuse.copies import further_copies
from kvboost.reuse.plan import Plan
from kvboost.reuse.request import RequestRows
from kvboost.runtime.keeping import Keeping
from kvboost.runtime.planner import Lookup
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime

YIELD_AFTER_SECONDS = 0.02
"""How long a request of a batch may place rows before it lets the other requests run."""


class Assembling:
    """The known rows of one request, whose KV is empty."""

    def __init__(
        self,
        runtime: Runtime,
        state: RequestState,
        kv: RequestKV,
        live_end: int,
        keeping: Keeping,
    ) -> None:
        """Rows from ``live_end`` on are computed in any case."""
        self._runtime, self._state, self._kv = runtime, state, kv
        self._live_end = live_end
        self._keeping = keeping

    def run(self, lookup: Lookup, num_shared: int = 0) -> Generator[None, object, Plan]:
        """Plans the prompt by what ``lookup`` has found, which is closed then, and copies the known
        rows into place; the first ``num_shared`` rows are those of a running request. If a chunk
        turns out to be lost, plans again without it, and without asking the remote store."""
        plan = yield from self._try(lookup, num_shared)
        while plan is None:
            request, planner = self._state.request, self._runtime.planner
            again = planner.lookup(request, self._live_end, ask_remote=False)
            plan = yield from self._try(again, self._kv.own_start)
        self._state.exact_rows = plan.exact_rows
        return plan

    def _try(self, lookup: Lookup, num_shared: int) -> Generator[None, object, Plan | None]:
        """As :meth:`run`; None if a chunk of the plan was lost on the way."""
        runtime, request, state = self._runtime, self._state.request, self._state
        planner, store, clock = runtime.planner, runtime.store, state.clock
        with lookup as known:
            plan, report = planner.plan(
                request, known, self._live_end, num_shared, can_move=self._kv.changes_rows
            )
            approximate = [h for h in plan.in_place if h.chunk.lineage is Lineage.APPROXIMATE]
            copies = further_copies(known.moved, plan.moved, store.fastest_tier)
            more = [hit for copy in copies for hit in copy]
            self._keeping.used = [[*known.exact, *approximate], *(run.hits for run in plan.moved)]
            self._keeping.used += [[hit] for hit in more]
            if any(hit.tier != store.fastest_tier for hit in plan.hits):
                self._keeping.touch_used()  # before these chunks are added to a faster tier
            clock.lap("plan")
            if plan.moved:
                self._kv.prepare_repair()
            try:
                rows = runtime.rows_of(self._kv)
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
        return self._kv.states is None or self._kv.states.is_at(end)

    def _not_in_place(self, plan: Plan) -> Sequence[Hit]:
        """The hits that are not in pages which the request shares with the cache."""
        start = self._kv.own_start
        hits = plan.hits
        if not start or not hits or hits[0].start >= start:
            return hits
        rest = [hit.clip(start, hit.end) for hit in hits if hit.end > start]
        self._runtime.store.count_hits(len(hits) - len(rest))
        return rest

    def _place(
        self, rows: RequestRows, hits: Sequence[Hit], share: float | None = None
    ) -> Generator[None, object, float]:
        """Copies ``hits`` into place, or mixes them with what is there; returns the seconds."""
        state, clock = self._state, self._state.clock
        seconds = since_pause = 0.0
        for hit, data in self._runtime.store.fetch(hits):
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
