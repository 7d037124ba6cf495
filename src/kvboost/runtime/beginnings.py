"""Exact rows of ended requests that stay in the pages of a GPU's slab.

A later request that begins with the same text holds the same pages: nothing is copied, and nothing
of them is written. The pages are those that no running request needs, so they take no memory of
their own, and go as soon as one does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvboost.config import GenerationMode
from kvboost.model.kv import Prefix, RequestKV
from kvboost.model.paged.kv import PagedKV, SharedPages
from kvboost.model.paged.pool import PagedPool
from kvboost.model.paged.slab import PAGE, Slab
from kvboost.runtime.request import Request
from kvboost.tokens.hashing import (
    ChunkKey,
    PrefixHashes,
    TokenIds,
    common_prefix,
    common_steps,
    prefix_hashes,
)

LEAST_ROWS = 512
"""Fewer rows are not worth a page table of their own; the cache has them too."""
MOST_BEGINNINGS = 64


@dataclass(frozen=True, eq=False)
class _Beginning:
    """Retained pages; they hold exact rows of ``token_ids`` under ``root``."""

    root: ChunkKey
    token_ids: TokenIds
    hashes: PrefixHashes
    epoch: int


class Beginnings:
    """Thread-safe."""

    def __init__(self) -> None:
        self._kept: list[_Beginning] = []
        self._lock = threading.Lock()
        self.num_shared = 0
        """How many requests have begun in pages of ended ones."""

    @contextmanager
    def borrow(
        self,
        pool: object,
        request: Request,
        root: ChunkKey,
        epoch: int,
        running: Prefix | None,
        *,
        before: int,
    ) -> Iterator[Prefix | None]:
        """The longest beginning of ``request`` that is in pages: ``running``, that of a running
        request, or a retained one, which is held until the context exits. It ends ``before`` a row
        that is to be computed."""
        least = max(LEAST_ROWS, running.count + PAGE if running is not None else 0)
        slab = pool.made_slab if isinstance(pool, PagedPool) else None
        found = None
        if slab is not None and request.mode is not GenerationMode.BASELINE:
            most = min(request.cacheable_rows, before)
            found = self._find(slab, request, most, root, epoch, least)
        if slab is None or found is None:
            yield running
            return
        beginning, rows = found
        holding = slab.hold(beginning, rows // PAGE)
        if holding is None:
            yield running
            return
        self.num_shared += 1
        try:
            yield SharedPages(list(holding.pages))
        finally:
            slab.release(holding)

    def keep(
        self, kv: RequestKV, token_ids: TokenIds, num_rows: int, root: ChunkKey, epoch: int
    ) -> None:
        """Retains the pages of the first ``num_rows`` rows of a request that ends, which are exact.
        ``token_ids`` are all of its tokens."""
        rows = num_rows // PAGE * PAGE
        if not isinstance(kv, PagedKV) or rows < LEAST_ROWS:
            return
        slab, ids = kv.slab, token_ids[:rows]
        new = _Beginning(root, ids, prefix_hashes(ids), epoch)
        with self._lock:
            self._remove_gone(slab, epoch)
            alike = [other for other in self._kept if other.root == root]
            common = [common_steps(other.hashes, new.hashes) for other in alike]
            if rows in common:
                return  # it is part of a longer one
            for other, shared in zip(alike, common, strict=True):
                if shared == len(other.token_ids):
                    self._drop(slab, other)
            if len(self._kept) == MOST_BEGINNINGS:
                self._drop(slab, self._kept[0])
            slab.retain(new, kv.holding.pages[: rows // PAGE])
            self._kept.append(new)

    def _find(
        self, slab: Slab, request: Request, most: int, root: ChunkKey, epoch: int, least: int
    ) -> tuple[_Beginning, int] | None:
        """The beginning that shares most rows with a request, up to ``most``, and how many, in
        whole pages; the last row of a prompt is always computed."""
        best = None
        most = min(most, len(request.token_ids) - 1)
        with self._lock:
            self._remove_gone(slab, epoch)
            for other in self._kept:
                if other.root == root and _begin_alike(other.token_ids, request.token_ids):
                    rows = min(common_steps(other.hashes, request.prefix_hashes), most)
                    rows = rows // PAGE * PAGE
                    if rows >= least:
                        best, least = (other, rows), rows + PAGE
        if best is None or common_prefix(best[0].token_ids, request.token_ids) < best[1]:
            return None
        return best

    def _remove_gone(self, slab: Slab, epoch: int) -> None:
        """Removes those whose pages were needed, and all from before something was forgotten."""
        for other in list(self._kept):
            if other.epoch != epoch or not slab.is_retained(other):
                self._drop(slab, other)

    def _drop(self, slab: Slab, beginning: _Beginning) -> None:
        self._kept.remove(beginning)
        slab.forget(beginning)


def _begin_alike(left: TokenIds, right: TokenIds) -> bool:
    """Whether hashes of the whole texts are worth their time."""
    return left[:LEAST_ROWS].tobytes() == right[:LEAST_ROWS].tobytes()
