"""Which rows of a prompt are cached, and whether reusing them pays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.store import ChunkStore
from kvboost.config import GenerationMode
from kvboost.model.compat import Support
from kvboost.reuse.cost import CostModel
from kvboost.reuse.plan import LIVE_TOKENS, Plan, make_plan
from kvboost.reuse.repair import PROBE_BAND
from kvboost.runtime.request import Request
from kvboost.tokens.hashing import ChunkKey


class Lookup:
    """What is ``known`` of a prompt, until this is closed. As a context, closes itself."""

    def __init__(self, lookup: AbstractContextManager[KnownRows]) -> None:
        self._open = ExitStack()
        self.known = self._open.enter_context(lookup)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> KnownRows:
        return self.known

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
    ) -> None:
        """``root`` gives the root key of a request; ``moves``: whether keys can be rotated."""
        self._store = store
        self._cost = cost
        self._support = support
        self._root = root
        self._moves = moves

    def lookup(
        self, request: Request, live_end: int, *, pin: bool = True, ask_remote: bool = True
    ) -> Lookup:
        """The cached rows of the prompt before ``live_end``, except the last one, which is always
        computed. The chunks are pinned until the lookup is closed."""
        return Lookup(self._lookup(request, live_end, pin, ask_remote))

    @contextmanager
    def _lookup(
        self, request: Request, live_end: int, pin: bool, ask_remote: bool
    ) -> Iterator[KnownRows]:
        if request.mode is GenerationMode.BASELINE:
            yield KnownRows()
            return
        reusable = min(self.reusable(request), request.cacheable_rows)
        ids = request.token_ids[: min(live_end - 1, reusable)]
        moved_before = 0
        if request.mode is GenerationMode.CHUNK_KV_REUSE and self._moves:
            moved_before = max(0, min(live_end - LIVE_TOKENS, reusable))
        root = self._root(request)
        with self._store.lookup(
            root,
            ids,
            moved_before=moved_before,
            repair=request.repair.name,
            pin=pin,
            ask_remote=ask_remote,
        ) as known:
            yield known

    def plan(
        self, request: Request, known: KnownRows, num_shared: int = 0
    ) -> tuple[Plan, tuple[str, ...]]:
        """The plan for a prompt whose first ``num_shared`` rows are in place, and notes for the
        caller."""
        plan = make_plan(len(request.token_ids), known, num_shared)
        notes = []
        depth = 1.0 if request.repair.takes_rounds else PROBE_BAND[1]
        if not self._cost.moving_pays(plan, request.repair, probe_depth=depth):
            plan = plan.without_moved()
            notes.append("moved text was computed: reusing it would not have been faster")
        if request.exactness == "verified" and request.mode is GenerationMode.PREFIX_CACHE:
            notes.append("verified: only exact hits are reused")
        if request.mode is GenerationMode.CHUNK_KV_REUSE and not self._moves:
            positions = self._support.architecture.positions.value
            notes.append(f"this model uses {positions}: only exact hits are reused")
        if request.mode is not GenerationMode.BASELINE and not self.reusable(request):
            notes.append(
                f"beyond {self._support.reuse_limit:,} tokens this model's rotation depends "
                "on the prompt's length: nothing is reused, moved or kept"
            )
        return plan, tuple(notes)

    def reusable(self, request: Request) -> int:
        """How many of the first rows may be reused or kept."""
        limit = self._support.reuse_limit
        if limit is None:
            return sys.maxsize
        return limit if len(request.token_ids) < limit else 0
