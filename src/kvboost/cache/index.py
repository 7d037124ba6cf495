"""The index of chunks whose data is elsewhere: which there are, which of them a prompt contains,
and which are still to be stored. It has no tensors and no threads.

A scheduler in one process plans with it while workers in other processes hold the data
(:mod:`kvboost.cache.data`). Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvboost.cache.chunk import ChunkInfo, Origin
from kvboost.cache.lookup.anchors import WINDOW
from kvboost.cache.lookup.catalogue import Catalogue
from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.lookup.prefix_tree import TOKEN_BYTES, sortable
from kvboost.cache.parts import Cut, Naming
from kvboost.cache.states import KnownStates
from kvboost.tokens.hashing import ChunkKey, TokenIds


class Index:
    """``row_bytes`` is the size of one token's KV, over all workers. With a ``naming`` secret, keys
    are keyed hashes and chunks are signed. ``on_removed`` hears of every chunk that is removed.
    ``resumes``: for a model with states, which can go on only where one is stored."""

    def __init__(
        self,
        cut: Cut,
        origin: Origin,
        *,
        row_bytes: int,
        naming: bytes = b"",
        window: int = WINDOW,
        on_removed: Callable[[Sequence[ChunkKey]], None] = lambda keys: None,
        resumes: bool = False,
    ) -> None:
        self.naming = Naming(cut, origin, secret=naming, row_bytes=row_bytes)
        self._catalogue = Catalogue(window, resumes=resumes)
        self._resumes = resumes
        self._tiers: dict[ChunkKey, str] = {}
        self._on_removed = on_removed

    def __len__(self) -> int:
        return len(self._catalogue)

    def __contains__(self, key: object) -> bool:
        return key in self._catalogue

    def tier(self, key: ChunkKey) -> str | None:
        """Where a chunk was when it was added; None if it is not known."""
        return self._tiers.get(key)

    def lookup(self, root: ChunkKey, token_ids: TokenIds, *, moved_before: int = 0) -> KnownRows:
        """The stored rows for ``token_ids``, as :meth:`kvboost.cache.store.ChunkStore.lookup`."""
        return self._catalogue.match(root, token_ids, moved_before, "", self._tiers.get)

    def may_hold(self, root: ChunkKey, token_ids: TokenIds) -> bool:
        """Whether a window of these tokens is in an exact chunk of ``root``, at any position."""
        return self._catalogue.may_hold(root, token_ids)

    def add(self, info: ChunkInfo, tier: str) -> None:
        """A chunk is in ``tier``. Chunks that this model cannot use only take room there."""
        if not self.naming.can_use(info):
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

    def store(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        boundaries: Sequence[int] = (),
    ) -> tuple[list[ChunkInfo], list[ChunkKey]]:
        """The chunks to be stored so that ``token_ids``, exact rows that begin a sequence, are
        known, parents first, and those that they replace. They count as stored in RAM from now on.
        Of a model with states, the last chunk is stored with those after its last row; if it was
        stored without, it is both new and replaced."""
        new: list[ChunkInfo] = []
        replaced: list[ChunkKey] = []
        order = sortable(token_ids)
        states = KnownStates(frozenset([len(token_ids)])) if self._resumes else None
        for place in self.naming.places(
            root, token_ids, exact_rows=len(token_ids), boundaries=boundaries, states=states
        ):
            parent, ids, part = place.parent, place.token_ids, place.part
            wanted = order[part.start * TOKEN_BYTES : part.end * TOKEN_BYTES]
            sibling = self._catalogue.sibling(parent, ids, wanted)
            if sibling and place.is_held_by(self._catalogue.info(sibling[0]), sibling[1]):
                place.key = sibling[0]
                continue
            info = replace(self.naming.describe(place), has_state=bool(place.state))
            place.key = info.key
            useless = self._replaced_by(info)
            self.remove(useless)
            replaced += useless
            new.append(info)
        # Together: no two of them have the same parent, so none was looked for among them.
        self._catalogue.add(*(info for info in new if info.key not in self._catalogue))
        self._tiers |= dict.fromkeys((info.key for info in new), "ram")
        return new, replaced

    def _replaced_by(self, info: ChunkInfo) -> list[ChunkKey]:
        """The chunks that a new one makes useless: a shorter one, or itself without states."""
        shorter = self._catalogue.leaf_extended_by(info.parent, info.token_ids)
        keys = [shorter] if shorter is not None else []
        if self._resumes:
            keys = [key for key in (*keys, info.key) if key in self._catalogue]
            keys = [key for key in keys if not self._catalogue.info(key).has_state]
        return keys
