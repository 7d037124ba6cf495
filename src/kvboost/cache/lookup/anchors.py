"""Finds stored chunks in a prompt at any position, by hashes of windows of their tokens.

A chunk is anchored by windows of its tokens, one every ``WINDOW`` tokens and one at its end. A
search hashes all windows of the prompt at once, looks up those that may be anchors, and follows
each hit: inside the chunk, back through its parents, forward through its children. Any
``2 * WINDOW - 1`` tokens of a chunk contain one of its anchors. Hashes only find candidates: tokens
are compared before one is trusted.

Text that is stored or requested many times must not make a search slow:

- of the chunks that contain a window, only the ``MAX_DONORS`` newest are followed;
- a window whose last token is already in ``MAX_DONORS`` runs is not followed, so every ``WINDOW``
  tokens of prompt give fewer than ``2 * MAX_DONORS`` runs;
- nor is a window that overlaps a followed copy of itself. If one token is repeated a thousand
  times, every window is every anchor on every diagonal; a few of them cover it.

Not thread-safe: the store holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from kvboost.cache.lookup.prefix_tree import TOKEN_BYTES, PrefixTree, sortable
from kvboost.tokens.hashing import ChunkKey, TokenIds, window_hashes

WINDOW = 32
MAX_DONORS = 4

_SLOTS = 1 << 20


class Piece(NamedTuple):
    """Rows ``[start, start + num_tokens)`` of the prompt are those from ``offset`` of ``key``."""

    key: ChunkKey
    start: int
    offset: int
    num_tokens: int


class Run(NamedTuple):
    """Rows ``[start, end)`` of the prompt, found in chunks that follow one another."""

    start: int
    end: int
    pieces: tuple[Piece, ...]


class _Anchors(NamedTuple):
    space: ChunkKey
    windows: list[tuple[int, int]]  # hash, offset in the chunk


class AnchorIndex:
    """``window`` is a power of two: hashes are built by doubling. Chunks should be as long."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._chunks: dict[ChunkKey, _Anchors] = {}
        # By hash: chunk and offset. A dict for its order, the newest last.
        self._donors: dict[int, dict[tuple[ChunkKey, int], None]] = {}
        # How many donors share a slot: most windows of a prompt fall into an empty one.
        self._filter = np.zeros(_SLOTS, dtype=np.uint32)
        self._counts = self._filter.data  # the same, for one slot at a time

    def __len__(self) -> int:
        return len(self._chunks)

    def insert(self, space: ChunkKey, chunks: Sequence[tuple[ChunkKey, TokenIds]]) -> None:
        """Makes ``chunks`` known to searches in ``space``, and to no others.

        A chunk shorter than a window has no anchor: it is reached from its neighbours.
        """
        hashes = window_hashes(space, np.concatenate([ids for _, ids in chunks]), self._window)
        starts = accumulate((len(ids) for _, ids in chunks), initial=0)
        offsets = [self._offsets(len(ids)) for _, ids in chunks]
        rows = [start + one for start, some in zip(starts, offsets, strict=False) for one in some]
        values = iter(hashes[np.array(rows, np.intp)].tolist())
        for (key, _), some in zip(chunks, offsets, strict=True):
            self._chunks[key] = _Anchors(space, [(next(values), offset) for offset in some])
            for value, offset in self._chunks[key].windows:
                self._donors.setdefault(value, {})[key, offset] = None
                self._counts[value % _SLOTS] += 1

    def _offsets(self, num_tokens: int) -> list[int]:
        """Where the windows of a chunk begin: every ``window`` tokens, and at its end."""
        last = num_tokens - self._window
        offsets = list(range(0, last + 1, self._window))
        return [*offsets, last] if last > 0 and last % self._window else offsets

    def remove(self, key: ChunkKey) -> None:
        for value, offset in self._chunks.pop(key).windows:
            donors = self._donors[value]
            del donors[key, offset]
            if not donors:
                del self._donors[value]
            self._counts[value % _SLOTS] -= 1

    def find(
        self,
        tree: PrefixTree,
        space: ChunkKey,
        token_ids: TokenIds,
        start: int = 0,
        order: bytes | None = None,
    ) -> list[Run]:
        """The runs of stored tokens in ``token_ids[start:]``, by where they begin.

        Each is as long as its chunks allow; those of different donors may overlap. ``tree`` must
        hold every chunk that was inserted here. ``order``: the tokens, and perhaps more that
        follow, as sortable bytes, if they are at hand.
        """
        hashes = window_hashes(space, token_ids[start:], self._window)
        in_slot = self._filter[(hashes & np.uint64(_SLOTS - 1)).view(np.int64)]
        maybe = np.flatnonzero(in_slot)[::-1]
        order = sortable(token_ids) if order is None else order
        search = _Search(tree, token_ids, order, start, self._window)
        followed: dict[int, int] = {}  # by hash, at which row
        all_donors, chunks, window = self._donors, self._chunks, self._window
        depth, seen, anchored = search.depth, search.seen, search.anchored
        # From the last row to the first: the newest donors of a text that repeats itself are at
        # its end, and what they contain comes before them.
        for row, value, num_donors in zip(
            (maybe + start).tolist(), hashes[maybe].tolist(), in_slot[maybe].tolist(), strict=True
        ):
            end = row + window
            if depth[end - 1] >= MAX_DONORS or followed.get(value, end) < end:
                continue
            if num_donors == 1 and anchored[row]:  # its only donor is in a run already
                followed[value] = row
                continue
            donors = all_donors.get(value)
            if donors is None:
                continue
            followed[value] = row
            for key, offset in islice(reversed(donors), MAX_DONORS):
                base = row - offset
                if seen.get((key, base), row + 1) > row and chunks[key].space == space:
                    search.follow(key, base, row)
        return sorted(search.runs, key=lambda run: run.start)

    def check_integrity(self) -> list[str]:
        """What does not add up between chunks, donors and filter; empty when all is well."""
        problems = []
        filed = {
            (value, (key, offset))
            for key, anchors in self._chunks.items()
            for value, offset in anchors.windows
        }
        found = {(value, donor) for value, donors in self._donors.items() for donor in donors}
        if filed != found or not all(self._donors.values()):
            problems.append(f"{len(filed)} anchors of chunks and {len(found)} of donors differ")
        slots = np.fromiter((value % _SLOTS for value, _ in found), dtype=np.intp)
        if not np.array_equal(np.bincount(slots, minlength=_SLOTS), self._filter):
            problems.append(f"the filter does not count {len(slots)} donors")
        return problems


class _Search:
    """One prompt compared with the tree. Hits come from its last row to its first.

    A chunk matches the prompt along a diagonal, named by the row of the chunk's first token:
    ``base``. The chunk may extend beyond the prompt at either end.
    """

    def __init__(
        self, tree: PrefixTree, token_ids: TokenIds, order: bytes, start: int, window: int
    ) -> None:
        self._tree = tree
        self._window = window
        self._token_ids = token_ids
        self._order = order
        self._start = start
        self._held = np.zeros(len(token_ids), dtype=np.uint32)
        self.seen: dict[tuple[ChunkKey, int], int] = {}  # chunk, base: its first row in a run
        self._anchored = np.zeros(len(token_ids), dtype=np.uint8)
        self.depth = self._held.data  # how many runs hold a row
        self.anchored = self._anchored.data  # rows at which a run has an anchor of its own
        self.runs: list[Run] = []

    def follow(self, key: ChunkKey, base: int, row: int) -> None:
        """Adds the run that holds the window at ``row`` on this diagonal, which is a new one."""
        begin, end = self._agreement(key, base, row)
        if begin > row or end < row + self._window:  # other tokens of the same hash
            return
        pieces = [Piece(key, begin, begin - base, end - begin)]
        if begin == base:
            pieces = [*self._backward(key, base)][::-1] + pieces
        if end - base == len(self._tree.tokens(key)):
            pieces += self._forward(key, end)
        window, anchored = self._window, self._anchored
        for key, start, offset, num_tokens in pieces:
            base = start - offset
            self.seen[key, base] = start
            last = start + num_tokens - window  # its last window, if it has one
            if last >= start:
                anchored[base + -(-offset // window) * window : last + 1 : window] = True
                anchored[last] |= last - base == len(self._tree.tokens(key)) - window
        run = Run(pieces[0].start, pieces[-1].start + pieces[-1].num_tokens, tuple(pieces))
        self._held[run.start : run.end] += 1
        self.runs.append(run)

    def _backward(self, key: ChunkKey, base: int) -> Iterator[Piece]:
        """What the chunks before ``key`` add to a run that begins with it, the last one first."""
        begin, key = base, self._tree.parent(key)
        while self._start < begin == base and (node := self._tree.node(key)) is not None:
            end = begin
            base -= len(node.token_ids)
            if base >= self._start and self._order.startswith(node.order, base * TOKEN_BYTES):
                begin = base
            else:
                begin, _ = self._agreement(key, base, end - 1)
                if begin == end:  # not even the last token agrees
                    break
            yield Piece(key, begin, begin - base, end - begin)
            key = node.parent

    def _forward(self, key: ChunkKey, end: int) -> Iterator[Piece]:
        """What the chunks after ``key`` add to a run that ends with it, at ``end``."""
        for match in self._tree.match(key, self._token_ids, end, self._order):
            yield Piece(match.key, end, 0, match.num_tokens)
            end += match.num_tokens

    def _agreement(self, key: ChunkKey, base: int, row: int) -> tuple[int, int]:
        """The longest ``[begin, end)`` around ``row`` where chunk and prompt agree.

        If they differ at ``row`` itself, ``begin`` is after it.
        """
        tokens = self._tree.tokens(key)
        first, last = max(base, self._start), min(base + len(tokens), len(self._token_ids))
        differ = (tokens[first - base : last - base] != self._token_ids[first:last]).tobytes()
        before, after = differ.rfind(1, 0, row - first + 1), differ.find(1, row - first + 1)
        return first + before + 1, last if after < 0 else first + after


def anchor_window(chunk_size: int) -> int:
    """The window for chunks of ``chunk_size`` tokens: smaller ones need smaller windows."""
    return min(WINDOW, 1 << (chunk_size.bit_length() - 1))
