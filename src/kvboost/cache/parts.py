"""The chunks that a sequence is stored as, exact and approximate, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvboost.cache.chunk import ChunkInfo, Lineage, Origin
from kvboost.cache.mixed import states_of
from kvboost.cache.quantize import KVData
from kvboost.cache.states import KnownStates
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, branch_key, chain_key

Cut = Callable[[TokenIds, Sequence[int]], list[tuple[int, int]]]
"""Cuts a sequence into chunks ``[start, end)`` without gaps, none across the given boundaries. The
first chunks must not depend on the tokens after them."""


class Part(NamedTuple):
    """One chunk to be admitted: the ``depth``-th of its sequence."""

    depth: int
    start: int
    end: int
    lineage: Lineage
    branches: bool = False
    """Whether it is the first of an approximate branch."""
    is_parent: bool = False
    """Whether another chunk follows it: then the stored chunk must end where it ends."""


@dataclass(slots=True)
class Place:
    """Where a part belongs in the tree."""

    part: Part
    token_ids: TokenIds
    """A view of those of the sequence."""
    root: ChunkKey
    before: ChunkKey
    parent: ChunkKey
    key: ChunkKey | None = None
    """The chunk that holds the part, or will hold it."""
    sibling: ChunkKey | None = None
    """A stored chunk of the same parent that begins alike, and how many tokens both share."""
    common: int = 0
    state: bool | None = None
    """Whether states are to be stored with it; None for a model without such."""
    lag: int = 0
    """As of its chunk."""

    def is_held_by(self, info: ChunkInfo, common: int) -> bool:
        """Whether a child of the same parent, which shares the first ``common`` tokens, holds the
        part."""
        length = len(self.token_ids)
        if self.state is not None:  # no part of a chunk can be used
            return common == info.num_tokens == length and (info.has_state or not self.state)
        return common == length and not (self.part.is_parent and info.num_tokens > length)


class Naming:
    """Cuts sequences of one model into chunks and names them. With a ``secret``, names are keyed
    hashes and chunks are signed. ``row_bytes`` is the size of a token's KV, if it is known.
    ``state_every``: of a model with states, at multiples of so many rows any machine stores them;
    None for other models."""

    def __init__(
        self,
        cut: Cut,
        origin: Origin,
        *,
        secret: bytes = b"",
        row_bytes: int = 0,
        state_every: int | None = None,
    ) -> None:
        self._cut = cut
        self._origin = origin
        self._secret = secret
        self._row_bytes = row_bytes
        self._state_every = state_every

    def places(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        exact_rows: int,
        repair: str = "",
        boundaries: Sequence[int] = (),
        states: KnownStates | None = None,
        lag_of: Callable[[int], int] | None = None,
    ) -> Iterator[Place]:
        """The places of a sequence, parents first. The caller sets the ``key`` of each before it
        takes the next; without one, this ends. ``states``: where they are known, of a model that
        has some. ``lag_of`` gives the lag of a row."""
        path: list[ChunkKey] = []
        for part in cut_parts(self._cut(token_ids, boundaries), exact_rows):
            before = path[part.depth - 1] if part.depth else root
            parent = branch_key(before, repair) if part.branches else before
            place = Place(part, token_ids[part.start : part.end], root, before, parent)
            place.state = None if states is None else part.end in states.rows
            place.lag = 0 if lag_of is None else lag_of(part.start)
            yield place
            if place.key is None:
                return
            path[part.depth :] = [place.key]

    def exact_chunks(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        edges: Sequence[int] = (),
        lag_of: Callable[[int], int] | None = None,
    ) -> Iterator[ChunkInfo]:
        """The exact chunks of ``token_ids``, as any machine would store them. ``lag_of`` gives the
        lag of a row, which changes at ``edges``."""
        every, length = self._state_every, len(token_ids)
        ends = [] if every is None else range(every, length + 1, every)
        cuts = [*ends, *edges]
        for place in self.places(
            root, token_ids, exact_rows=length, boundaries=cuts, lag_of=lag_of
        ):
            info = replace(self.describe(place), has_state=place.part.end in ends)
            place.key = info.key
            yield info

    def name(self, place: Place) -> ChunkKey:
        """The key of a new chunk at ``place``."""
        return chain_key(place.parent, place.token_ids, secret=self._secret)

    def describe(self, place: Place, data: KVData | None = None) -> ChunkInfo:
        """A new chunk at ``place``, of which the ``data`` need not be known."""
        ids = as_token_ids(place.token_ids)  # a view would keep the whole prompt alive
        return ChunkInfo(
            key=place.key or self.name(place),
            parent=place.parent,
            before=place.before,
            root=place.root,
            token_ids=ids,
            base_position=place.part.start,
            lineage=place.part.lineage,
            bits=16 if data is None else data.bits,
            nbytes=len(ids) * self._row_bytes if data is None else data.nbytes,
            origin=self._origin,
            signed=bool(self._secret),
            lag=place.lag,
            has_state=data is not None and bool(states_of(data)),
        )

    def can_use(self, info: ChunkInfo) -> bool:
        """Chunks of other models, and signed ones that cannot be checked, only take room."""
        return info.is_usable(self._origin, has_secret=bool(self._secret))


def cut_parts(cuts: list[tuple[int, int]], exact_rows: int) -> Iterator[Part]:
    """The chunks of a sequence. A chunk in which exactness ends comes twice: its exact rows,
    and all of it as the first chunk of the approximate branch::

        exact        |----|----|--|
        approximate            |----|----|
    """
    branched = False
    for depth, (start, end) in enumerate(cuts):
        has_next = depth + 1 < len(cuts)
        if start < exact_rows:
            is_parent = has_next and end <= exact_rows
            yield Part(depth, start, min(end, exact_rows), Lineage.EXACT, is_parent=is_parent)
        if end > exact_rows:
            inexact = Lineage.APPROXIMATE
            yield Part(depth, start, end, inexact, not branched, is_parent=has_next)
            branched = True
