"""Which rows of a prompt are cached, whether reusing them pays, and what is noted to explain it."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvboost.cache.lookup.hits import EarlyLookup, Hit, KnownRows, MovedRun
from kvboost.cache.store import ChunkStore
from kvboost.config import GenerationMode
from kvboost.model.loading.compat import Support
from kvboost.results import Explanation, MovedRows, PlanFacts, ReuseReport
from kvboost.results.explaining import SHOWN_TOKENS, Decode, Traces, explain
from kvboost.reuse.cost import CostModel, Weighed
from kvboost.reuse.plan import LEAST_TOKENS, LIVE_TOKENS, Plan, make_plan
from kvboost.runtime.request import Request
from kvboost.tokens.hashing import ChunkKey, TokenIds
from kvboost.tokens.images import PlacedImages

if TYPE_CHECKING:
    from typing import Self


class Lookup:
    """The cached rows of a prompt (``known``). They stay pinned until this is closed, at the end of
    its context."""

    def __init__(self, lookup: AbstractContextManager[KnownRows]) -> None:
        self._open = ExitStack()
        self.known = self._open.enter_context(lookup)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Planner:
    """Plans requests against the chunk store. Thread-safe."""

    def __init__(
        self,
        store: ChunkStore,
        cost: CostModel,
        support: Support,
        root: Callable[[Request], ChunkKey],
        *,
        moves: bool,
        decode: Decode,
    ) -> None:
        """``root`` gives the root key of a request; ``moves``: whether keys can be rotated;
        ``decode`` gives the text of token ids, for explanations."""
        self._store = store
        self._cost = cost
        self._support = support
        self._root = root
        self._moves = moves
        self._decode = decode

    def look_early(self, request: Request) -> EarlyLookup | None:
        """Looks up the cached rows of a prompt that waits for its turn: see
        :meth:`ChunkStore.look_early`."""
        if request.mode is GenerationMode.BASELINE:
            return None
        ids, moved_before = self._wanted(request, len(request.token_ids))
        return self._store.look_early(
            self._root(request), ids, moved_before=moved_before, repair=request.repair.name
        )

    def lookup(
        self,
        request: Request,
        live_end: int,
        *,
        pin: bool = True,
        ask_remote: bool = True,
        early: EarlyLookup | None = None,
    ) -> Lookup:
        """The cached rows of the prompt before ``live_end``, except the last one, which is always
        computed. The chunks are pinned until the lookup is closed. ``early``: what was cached when
        the request arrived."""
        return Lookup(self._lookup(request, live_end, pin, ask_remote, early))

    def _wanted(self, request: Request, live_end: int) -> tuple[TokenIds, int]:
        """The tokens that the cache may serve, and how many of them by moved text."""
        ids = request.token_ids[: min(live_end - 1, self._cacheable(request))]
        return ids, self._movable(request, live_end)

    @contextmanager
    def _lookup(
        self,
        request: Request,
        live_end: int,
        pin: bool,
        ask_remote: bool,
        early: EarlyLookup | None,
    ) -> Iterator[KnownRows]:
        if request.mode is GenerationMode.BASELINE:
            yield KnownRows()
            return
        ids, moved_before = self._wanted(request, live_end)
        root, images = self._root(request), request.images
        turns = images is not None and images.is_spatial
        with self._store.lookup(
            root,
            ids,
            moved_before=moved_before,
            repair=request.repair.name,
            pin=pin,
            ask_remote=ask_remote,
            early=early,
            edges=images.edges if images is not None and turns else (),
            lag_of=images.lag_of if images is not None and turns else None,
        ) as known:
            if images is not None:
                known = _within(known, images)
            yield _turned(known, images)

    def plan(
        self,
        request: Request,
        known: KnownRows,
        live_end: int,
        num_shared: int = 0,
        *,
        can_move: bool = True,
    ) -> tuple[Plan, ReuseReport]:
        """The plan for a prompt whose first ``num_shared`` rows are in place, and what to report of
        it. Rows from ``live_end`` on are computed in any case. ``can_move``: whether the request's
        KV takes moved text."""
        plan, weighed, notes = make_plan(len(request.token_ids), known, num_shared), None, []
        refusal = self._refusal(request)
        if plan.moved:
            weighed = self._cost.weigh(plan, request.repair)
        if weighed is not None and not weighed.pays:
            plan, refusal = plan.without_moved(), "slower"
            notes.append("moved text was computed: reusing it would not have been faster")
        elif plan.moved and not can_move:
            plan, refusal, weighed = plan.without_moved(), "model", None
            notes.append("moved text was computed: far rows of fewer bits do not change")
        if request.exactness == "verified" and request.mode is GenerationMode.PREFIX_CACHE:
            notes.append("verified: only exact hits are reused")
        if request.mode is GenerationMode.CHUNK_KV_REUSE and not self._moves:
            why = self._support.architecture.why_exact_only or "keeps its keys as they are"
            notes.append(f"this model {why}: only exact hits are reused")
        if known.matched - plan.num_known >= LEAST_TOKENS:
            notes.append(
                f"{known.matched:,} tokens are known, and states after {plan.num_known:,} of them: "
                "this model goes on from there"
            )
        if request.mode is not GenerationMode.BASELINE and not self.reusable(request):
            notes.append(
                f"beyond {self._support.reuse_limit:,} tokens this model's rotation depends "
                "on the prompt's length: nothing is reused, moved or kept"
            )
        weighed = weighed if refusal == "slower" else None
        facts = self._facts(request, known, plan, live_end, refusal, weighed)
        explain = explainer(self._store, request.token_ids, self._decode)
        return plan, ReuseReport(plan.spans, tuple(notes), facts=facts, explainer=explain)

    def _facts(
        self,
        request: Request,
        known: KnownRows,
        plan: Plan,
        live_end: int,
        refusal: str,
        weighed: Weighed | None,
    ) -> PlanFacts:
        """The facts about a plan that are needed to explain it later. Every plan notes them; it
        takes microseconds, because nothing is looked at chunk by chunk. ``weighed``: the costs by
        which moved text was refused."""
        root, last, cacheable = self._root(request), live_end - 1, self._cacheable(request)
        in_place = known.in_place
        known_rows = in_place[-1].end if in_place else 0
        prefix = max(plan.num_shared, known_rows)
        follows: list[int] = []
        if prefix < min(last, cacheable) and plan.num_shared <= known_rows:
            ids = request.token_ids
            follows = self._store.following(root, in_place, ids, SHOWN_TOKENS).tolist()
        scale = 1e3 if weighed is not None and weighed.is_measured else 1.0
        return PlanFacts(
            time.time(),
            root,
            request.mode.value,
            prefix,
            tuple(follows),
            last,
            cacheable,
            self._movable(request, live_end),
            tuple(
                MovedRows(
                    one.start, one.end, one.hits[0].distance, one.rows_before, one.rows_changed
                )
                for one in plan.moved
            ),
            tuple(_left(known, plan)) if known.moved else (),
            refusal,
            None if weighed is None else (weighed.moving * scale, weighed.computing * scale),
            scale > 1,
        )

    def _refusal(self, request: Request) -> str:
        """Why text is not moved, whatever is cached; empty if it may be."""
        if self._support.architecture.states and request.mode is not GenerationMode.BASELINE:
            return "model"
        if request.mode is not GenerationMode.CHUNK_KV_REUSE:
            return "mode"
        return "" if self._moves else "model"

    def _cacheable(self, request: Request) -> int:
        """How many of the first rows the cache may serve."""
        if request.mode is GenerationMode.BASELINE:
            return 0
        return min(self.reusable(request), request.cacheable_rows)

    def _movable(self, request: Request, live_end: int) -> int:
        """Moved text may serve rows before this one."""
        if self._refusal(request):
            return 0
        return max(0, min(live_end - LIVE_TOKENS, self._cacheable(request)))

    def reusable(self, request: Request) -> int:
        """How many of the first rows may be reused or kept."""
        limit = self._support.reuse_limit
        if limit is None:
            return sys.maxsize
        return limit if len(request.token_ids) < limit else 0


def _within(known: KnownRows, images: PlacedImages) -> KnownRows:
    """``known`` without the rows of images of which too few are known to tell which image it is."""
    end = known.exact[-1].end if known.exact else 0
    last = images.last_end(end)
    exact = _until(known.exact, last)
    approximate = known.approximate if last == end else ()
    if approximate:
        approximate = _until(approximate, images.last_end(approximate[-1].end))
    moved = []
    for run in known.moved:
        start, stop = images.first_start(run.start), images.last_end(run.end)
        if start < stop:
            moved.append(run.clip(start, stop))
    return KnownRows(exact, approximate, tuple(moved))


def _turned(known: KnownRows, images: PlacedImages | None) -> KnownRows:
    """``known`` with how much further moved keys are rotated than their rows are moved."""
    lag_of = images.lag_of if images is not None and images.is_spatial else _no_lag
    hits = [hit for run in known.moved for hit in run.hits]
    if lag_of is _no_lag and not any(hit.chunk.lag for hit in hits):
        return known
    moved = (
        MovedRun(
            tuple(hit._replace(turn=hit.chunk.lag - lag_of(hit.start)) for hit in run.hits),
            run.resemblance,
        )
        for run in known.moved
    )
    return replace(known, moved=tuple(moved))


def _no_lag(row: int) -> int:
    return 0


def _until(hits: tuple[Hit, ...], end: int) -> tuple[Hit, ...]:
    return tuple(hit.clip(hit.start, end) for hit in hits if hit.start < end)


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
    """A function that explains a report on ``token_ids``. It does not keep the store, and therefore
    not the engine, alive."""
    found = weakref.ref(store)

    def work(report: ReuseReport, other_salts: bool) -> Explanation:
        def trace(root: ChunkKey, **options: Any) -> Traces:
            there = found()
            return Traces() if there is None else there.trace(token_ids, root, **options)

        return explain(report, token_ids.tolist(), decode, trace, other_salts=other_salts)

    return work
