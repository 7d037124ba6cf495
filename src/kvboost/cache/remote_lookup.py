"""Asking the remote store for the chunks that a prompt can use.

What it says it has is entered into the catalogue, so that the search there finds it like any other
chunk. Its data are read and checked when a request uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvboost.cache.chunk import ChunkInfo
from kvboost.cache.lookup.catalogue import Catalogue
from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.parts import Naming
from kvboost.cache.tiers.residency import Residency
from kvboost.cache.tiers.transfers import Transfers
from kvboost.tokens.hashing import ChunkKey, TokenIds
from kvboost.tokens.marks import WINDOW


class RemoteLookup:
    """Call no public method with ``lock``, the store's, held: the network is waited for. They
    return the keys of what they entered."""

    def __init__(
        self,
        catalogue: Catalogue,
        residency: Residency,
        transfers: Transfers,
        lock: threading.RLock,
        naming: Naming,
    ) -> None:
        self._catalogue = catalogue
        self._residency = residency
        self._transfers = transfers
        self._lock = lock
        self._naming = naming

    def ask_for_prefix(self, root: ChunkKey, token_ids: TokenIds) -> list[ChunkKey]:
        """Asks by key for the chunks that continue what is known of ``token_ids``."""
        if not self._transfers.has_remote:
            return []
        chunks = list(self._naming.exact_chunks(root, token_ids))
        with self._lock:
            unknown = [info for info in chunks if info.key not in self._catalogue]
        there = self._transfers.remote_has([info.key for info in unknown])
        return self._enter([info for info, has in zip(unknown, there, strict=False) if has])

    def search(
        self, root: ChunkKey, token_ids: TokenIds, end: int, match: Callable[[], KnownRows]
    ) -> list[ChunkKey]:
        """Searches for chunks that contain text of ``token_ids[:end]`` at any position, where
        ``match``, called with the lock held, leaves at least ``WINDOW`` rows uncovered."""
        if end < WINDOW or not self._transfers.can_search_remote:
            return []
        with self._lock:
            gaps = match().gaps(end, WINDOW)
        if not gaps:
            return []
        texts = [token_ids[start:stop] for start, stop in gaps]
        found = self._enter_usable(self._transfers.search_remote(root, texts))
        if found:
            with self._lock:
                before, after = self._around(match(), end)
            around = self._transfers.search_remote_around(root, before, after)
            found += self._enter_usable(around)
        return found

    def _around(self, known: KnownRows, end: int) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Unknown chunks before moved runs that begin with a whole chunk, and the last chunks of
        runs that end with one: marks do not find what shares only a few tokens with a prompt. The
        lock must be held."""
        before: dict[ChunkKey, None] = {}
        after: dict[ChunkKey, None] = {}
        gaps = known.gaps(end, 1)
        begins, ends = {start for start, _ in gaps}, {stop for _, stop in gaps}
        for run in known.moved:
            first, last = run.hits[0], run.hits[-1]
            parent = first.chunk.parent
            continues = parent == first.chunk.before != first.chunk.root
            if run.start in ends and first.offset == 0 and continues:
                before[parent] = None
            if run.end in begins and last.offset + last.num_tokens == last.chunk.num_tokens:
                after[last.chunk.key] = None
        return [key for key in before if key not in self._catalogue], list(after)

    def _enter_usable(self, infos: Sequence[ChunkInfo]) -> list[ChunkKey]:
        """Enters chunks by what their headers say."""
        return self._enter([info for info in infos if self._naming.can_use(info)])

    def _enter(self, infos: Sequence[ChunkInfo]) -> list[ChunkKey]:
        entered: list[ChunkKey] = []
        for info in infos:
            with self._lock:  # one at a time: other lookups need not wait for many
                if info.key not in self._catalogue:
                    self._catalogue.add(info)
                    self._residency.add_remote([info.key])
                    entered.append(info.key)
        return entered
