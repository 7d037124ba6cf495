"""The index of chunks whose data is elsewhere: which there are, which of them a prompt contains,
and which are still to be stored. It has no tensors and no threads.

A scheduler in one process plans with it while workers in other processes hold the data
(:mod:`kvboost.cache.data`). Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvboost.cache.chunk import ChunkInfo, Lineage, Origin
from kvboost.cache.lookup.anchors import WINDOW
from kvboost.cache.lookup.catalogue import Catalogue
from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.parts import Cut, Part, cut_parts
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, branch_key, chain_key


class Index:
    """``row_bytes`` is the size of one token's KV, over all workers. With a ``naming`` secret, keys
    are keyed hashes and chunks are signed. ``on_removed`` hears of every chunk that is removed."""

    def __init__(
        self,
        cut: Cut,
        origin: Origin,
        *,
        row_bytes: int,
        naming: bytes = b"",
        window: int = WINDOW,
        on_removed: Callable[[Sequence[ChunkKey]], None] = lambda keys: None,
    ) -> None:
        self._cut = cut
        self._origin = origin
        self._row_bytes = row_bytes
        self._naming = naming
        self._catalogue = Catalogue(window)
        self._tiers: dict[ChunkKey, str] = {}
        self._on_removed = on_removed

    def __len__(self) -> int:
        return len(self._catalogue)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._catalogue

    def tier(self, key: ChunkKey) -> str | None:
        """Where a chunk was when it was added; None if it is not known."""
        return self._tiers.get(key)

    def lookup(
        self, root: ChunkKey, token_ids: TokenIds, *, moved_before: int = 0, repair: str = ""
    ) -> KnownRows:
        """What is known of ``token_ids``, as :meth:`kvboost.cache.store.ChunkStore.lookup`."""
        return self._catalogue.match(root, token_ids, moved_before, repair, self._tiers.get)

    def add(self, info: ChunkInfo, tier: str) -> None:
        """A chunk is in ``tier``. Chunks that this model cannot use only take room there."""
        if not info.is_usable(self._origin, has_secret=bool(self._naming)):
            return
        if info.key not in self._catalogue:
            self._catalogue.add(info)
        self._tiers[info.key] = tier

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are in no tier any more."""
        removed = [key for key in keys if self._tiers.pop(key, None) is not None]
        for key in removed:
            self._catalogue.remove(key)
        self._on_removed(removed)

    def clear(self) -> list[ChunkKey]:
        """Forgets everything; returns what there was."""
        keys = list(self._tiers)
        self._catalogue.clear()
        self._tiers.clear()
        self._on_removed(keys)
        return keys

    def infos(self, root: ChunkKey) -> dict[ChunkKey, ChunkInfo]:
        """The chunks of ``root``, a copy that can be searched in another thread."""
        return {key: info for key, info in self._catalogue.infos().items() if info.root == root}

    def unknown(self, root: ChunkKey, token_ids: TokenIds) -> list[ChunkInfo]:
        """The exact chunks of ``token_ids`` that are not known here. Another machine may have
        stored them."""
        unknown: list[ChunkInfo] = []
        before = root
        for depth, (start, end) in enumerate(self._cut(token_ids, ())):
            ids = as_token_ids(token_ids[start:end])
            part = Part(depth, start, end, Lineage.EXACT)
            info = self._describe(root, before, before, part, ids)
            if info.key not in self._catalogue:
                unknown.append(info)
            before = info.key
        return unknown

    def store(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        exact_rows: int,
        repair: str = "",
        boundaries: Sequence[int] = (),
        tier: str = "ram",
    ) -> tuple[list[ChunkInfo], list[ChunkKey]]:
        """The chunks to be stored so that ``token_ids``, which begin a sequence, are known, parents
        first, and those that they replace. They count as stored in ``tier`` from now on. The first
        ``exact_rows`` are exact; the others go into a branch beside the exact tree."""
        new: list[ChunkInfo] = []
        replaced: list[ChunkKey] = []
        path: list[ChunkKey] = []
        for part in cut_parts(self._cut(token_ids, boundaries), exact_rows):
            before = path[part.depth - 1] if part.depth else root
            parent = branch_key(before, repair) if part.branches else before
            ids = as_token_ids(token_ids[part.start : part.end])
            key = self._existing(parent, part, ids)
            if key is None:
                info = self._describe(root, before, parent, part, ids)
                key = info.key
                if (shorter := self._catalogue.leaf_extended_by(parent, ids)) is not None:
                    self.remove([shorter])
                    replaced.append(shorter)
                self.add(info, tier)
                new.append(info)
            path[part.depth :] = [key]
        return new, replaced

    def _existing(self, parent: ChunkKey, part: Part, ids: TokenIds) -> ChunkKey | None:
        """The stored chunk that holds ``part``; None if there is none."""
        sibling = self._catalogue.sibling(parent, ids)
        if sibling is None or sibling[1] < len(ids):
            return None
        length = self._catalogue.info(sibling[0]).num_tokens
        return None if length > len(ids) and part.is_parent else sibling[0]

    def _describe(
        self, root: ChunkKey, before: ChunkKey, parent: ChunkKey, part: Part, ids: TokenIds
    ) -> ChunkInfo:
        return ChunkInfo(
            key=chain_key(parent, ids, secret=self._naming),
            parent=parent,
            before=before,
            root=root,
            token_ids=ids,
            base_position=part.start,
            lineage=part.lineage,
            bits=16,
            nbytes=len(ids) * self._row_bytes,
            origin=self._origin,
            signed=bool(self._naming),
        )
