"""What is noted of a plan, so that it can be explained later. It is noted for every request, and
costs some microseconds: nothing is looked at chunk by chunk."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kvboost.cache.lookup.hits import KnownRows, MovedRun
from kvboost.cache.store import ChunkStore
from kvboost.results import Explanation, MovedRows, PlanFacts, ReuseReport
from kvboost.results.explaining import SHOWN_TOKENS, Decode, Traces, explain
from kvboost.reuse.cost import Weighed
from kvboost.reuse.plan import Plan
from kvboost.runtime.request import Request
from kvboost.tokens.hashing import ChunkKey, TokenIds


def plan_facts(
    store: ChunkStore,
    root: ChunkKey,
    request: Request,
    known: KnownRows,
    plan: Plan,
    *,
    last: int,
    cacheable: int,
    movable: int,
    refusal: str,
    weighed: Weighed | None,
) -> PlanFacts:
    """``known`` is what ``plan`` was made of; ``weighed`` the costs by which moved text was
    refused."""
    in_place = known.in_place
    known_rows = in_place[-1].end if in_place else 0
    prefix = max(plan.num_shared, known_rows)
    follows: TokenIds | Sequence[int] = ()
    is_whole = prefix >= min(last, cacheable) or plan.num_shared > known_rows
    if not is_whole:
        follows = store.following(root, in_place, request.token_ids, SHOWN_TOKENS).tolist()
    moved = tuple(
        MovedRows(run.start, run.end, run.hits[0].distance, run.rows_before, run.rows_changed)
        for run in plan.moved
    )
    scale = 1e3 if weighed is not None and weighed.is_measured else 1.0
    return PlanFacts(
        time.time(),
        root,
        request.mode.value,
        prefix,
        tuple(follows),
        last,
        cacheable,
        movable,
        moved,
        tuple(_left(known, plan)) if known.moved else (),
        refusal,
        None if weighed is None else (weighed.moving * scale, weighed.computing * scale),
        scale > 1,
    )


def _left(known: KnownRows, plan: Plan) -> list[tuple[int, int]]:
    """The rows that runs of ``known`` cover and the plan computes."""
    left: list[tuple[int, int]] = []
    runs = iter(known.moved)  # by where they begin
    run: MovedRun | None = next(runs)
    row = 0
    for rows in plan.computed():
        row = max(row, rows.start)
        while run is not None and run.start < rows.stop:
            if run.end > row:
                left.append((max(row, run.start), min(run.end, rows.stop)))
                row = left[-1][1]
            if run.end > rows.stop:
                break
            run = next(runs, None)
    return left


def explainer(
    store: ChunkStore, token_ids: TokenIds, decode: Decode
) -> Callable[[ReuseReport, bool], Explanation]:
    """What explains a report on ``token_ids``. It does not keep the store, and so not the engine,
    alive."""
    found = weakref.ref(store)

    def work(report: ReuseReport, other_salts: bool) -> Explanation:
        def trace(root: ChunkKey, **options: Any) -> Traces:
            there = found()
            return Traces() if there is None else there.trace(token_ids, root, **options)

        return explain(report, token_ids.tolist(), decode, trace, other_salts=other_salts)

    return work
