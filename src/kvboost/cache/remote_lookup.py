"""Asking the remote store for the chunks that a prompt can use.

What it says it has is entered into the catalogue, so that the search there finds it like any other
chunk. Its data are read and checked when a request uses it. The store and the index of another
engine's scheduler both ask in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvboost.cache.chunk import ChunkInfo
from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.parts import Naming
from kvboost.cache.tiers.remote.tier import RemoteTier
from kvboost.tokens.hashing import ChunkKey, TokenIds
from kvboost.tokens.marks import WINDOW

NO_LOCK = nullcontext()


class RemoteLookup:
    """``catalogue`` has the known chunks, and ``enter`` adds one. ``lock``, if there is one, guards
    both."""

    def __init__(
        self,
        remote: RemoteTier,
        naming: Naming,
        catalogue: Container[ChunkKey],
        enter: Callable[[ChunkInfo], None],
        lock: AbstractContextManager[object] = NO_LOCK,
    ) -> None:
        self._remote = remote
        self._naming = naming
        self._catalogue = catalogue
        self._enter_one = enter
        self._lock = lock

    def ask(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        moved_before: int,
        match: Callable[[], KnownRows],
        edges: Sequence[int] = (),
        lag_of: Callable[[int], int] | None = None,
    ) -> list[ChunkKey]:
        """Enters what the remote store has of ``token_ids``: its prefix, and text of the rows
        before ``moved_before`` that ``match``, called with the lock held, leaves uncovered. Returns
        the keys. Call this without the lock: the network is waited for. ``lag_of`` gives
        ``ChunkInfo.lag`` of a row, which changes at ``edges``."""
        found = self._ask_for_prefix(root, token_ids, edges, lag_of)
        return found + self._search(root, token_ids, moved_before, match)

    def _ask_for_prefix(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        edges: Sequence[int],
        lag_of: Callable[[int], int] | None,
    ) -> list[ChunkKey]:
        """Asks by key for the chunks that continue what is known of ``token_ids``."""
        chunks = list(self._naming.exact_chunks(root, token_ids, edges, lag_of))
        with self._lock:
            unknown = [info for info in chunks if info.key not in self._catalogue]
        there = self._remote.contains_many([info.key for info in unknown])
        return self._enter([info for info, has in zip(unknown, there, strict=True) if has])

    def _search(
        self, root: ChunkKey, token_ids: TokenIds, end: int, match: Callable[[], KnownRows]
    ) -> list[ChunkKey]:
        """Searches for chunks that contain text of ``token_ids[:end]`` at any position, where
        ``match`` leaves at least ``WINDOW`` rows uncovered."""
        if end < WINDOW or not self._remote.has_index:
            return []
        with self._lock:
            gaps = match().gaps(end, WINDOW)
        if not gaps:
            return []
        texts = [token_ids[start:stop] for start, stop in gaps]
        found = self._enter_usable(self._remote.find(root, texts))
        if found:
            with self._lock:
                before, after = self._around(match(), end)
            around = self._remote.find_around(root, before, after)
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
                    self._enter_one(info)
                    entered.append(info.key)
        return entered
