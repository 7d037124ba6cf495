"""The running requests, and the rows that another request may share with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvboost.config import GenerationMode
from kvboost.model.execution.kv import Prefix, RequestKV
from kvboost.runtime.request import Request, RequestState
from kvboost.tokens.hashing import HASHED_STEP, ChunkKey, common_prefix, common_steps

LEAST_SHARED = 512
"""Fewer rows are copied instead: attending to them separately would cost more."""
GRID = 64
"""Shared prefixes end on this grid, so that requests with different questions about one text share
the same rows. A multiple of ``HASHED_STEP``."""


@dataclass(frozen=True, eq=False)
class _Running:
    state: RequestState
    root: ChunkKey
    kv: RequestKV


class RunningRequests:
    """The running requests of the loop. Thread-safe; the loop's thread registers requests."""

    def __init__(self, *, shares: bool = True) -> None:
        """``shares=False`` for models that may recompute rows that are already in place."""
        self._shares = shares
        self._running: list[_Running] = []
        self._lock = threading.Lock()

    @contextmanager
    def register(self, state: RequestState, root: ChunkKey, kv: RequestKV) -> Iterator[None]:
        """Lists a request of a batch as running until the context exits."""
        if not state.batched:
            yield
            return
        one = _Running(state, root, kv)
        with self._lock:
            self._running.append(one)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(one)

    def shared_prefix_for(self, request: Request, root: ChunkKey) -> Prefix | None:
        """The prefix of ``request`` that a running request has in place, if there is one."""
        donor, count = self._find(request, root)
        return donor.kv.share(count) if donor is not None else None

    def num_shared(self, request: Request, root: ChunkKey) -> int:
        """How many rows ``shared_prefix_for`` would give at most."""
        return self._find(request, root)[1]

    def nbytes(self) -> tuple[int, int]:
        """Bytes that running requests hold, shared memory counted once; and the bytes they would
        need in addition if they shared nothing."""
        with self._lock:
            kvs = [one.kv for one in self._running]
        held: dict[int, int] = {}
        for kv in kvs:
            if id(kv.slab) not in held:  # all requests with pages of a slab say the same
                held |= kv.memory()
        return sum(held.values()), sum(kv.spared_bytes for kv in kvs)

    def _find(self, request: Request, root: ChunkKey) -> tuple[_Running | None, int]:
        best: _Running | None = None
        most = LEAST_SHARED - 1
        if not self._shares or request.mode is GenerationMode.BASELINE:
            return None, 0
        with self._lock:
            candidates = [one for one in self._running if one.root == root and one.kv.shares]
        # The last row is always computed.
        limit = min(len(request.token_ids) - 1, request.cacheable_rows)
        for one in candidates:
            if one.state.request.mode is GenerationMode.BASELINE:
                continue
            usable = min(one.state.rows, one.state.exact_rows, limit)
            usable = min(usable, one.state.request.cacheable_rows)
            if one.kv.start:
                usable = min(usable, one.kv.own_start)
            if usable // GRID * GRID <= most:
                continue
            known, wanted = one.state.request.prefix_hashes, request.prefix_hashes
            # A hash is one of all tokens before it: most prompts are ruled out by a single one.
            longer = (most // GRID + 1) * GRID // HASHED_STEP - 1
            if len(known) <= longer or known[longer] != wanted[longer]:
                continue
            usable = min(usable, common_steps(known, wanted))
            if usable // GRID * GRID > most:
                best, most = one, usable // GRID * GRID
        if best is None or common_prefix(best.state.request.token_ids, request.token_ids) < most:
            return None, 0
        if request.images is not None:
            while (end := request.images.last_end(most)) < most:
                most = end // GRID * GRID
            if most < LEAST_SHARED:
                return None, 0
        return best, most
