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

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost.cache.lookup.prefix_tree import TOKEN_BYTES, Node, PrefixTree, sortable
from kvboost.tokens.hashing import ChunkKey, TokenIds, hashes_in, window_polynomials

WINDOW = 32
MAX_DONORS = 4

_SLOTS = 1 << 20
_ROWS = 1 << 32
"""More than a prompt or a chunk has. A chunk's number plus a row names one of its diagonals, and
its number minus an offset one of its windows: at some row, that is the window's diagonal."""


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


class Windows(NamedTuple):
    """The windows of some chunks, a row for each chunk; what a chunk lacks is 0."""

    length: int
    polynomials: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    """Of the chunks, in tokens; 0 if there is no window."""


class _Anchors(NamedTuple):
    space: ChunkKey
    number: int  # a multiple of _ROWS that no other chunk has
    offsets: tuple[int, ...]  # where its windows begin
    polynomials: npt.NDArray[np.uint64]  # of these

    def windows(self) -> Iterable[tuple[int, int]]:
        """Hashes and offsets."""
        hashes = hashes_in(self.space, self.polynomials)
        return zip(hashes.tolist(), self.offsets, strict=True)


class AnchorIndex:
    """``window`` is a power of two: hashes are built by doubling. Chunks should be as long."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._chunks: dict[ChunkKey, _Anchors] = {}
        self._keys: dict[int, ChunkKey] = {}  # by number
        self.newest = 0
        """The number of the chunk that was inserted last: the largest one."""
        # By hash: a number minus an offset, or several. A dict for its order, the newest last.
        self._donors: dict[int, int | dict[int, None]] = {}
        # How many donors share a slot: most windows of a prompt fall into an empty one.
        self._filter = np.zeros(_SLOTS, dtype=np.uint32)
        self._counts = self._filter.data  # the same, for one slot at a time

    def __len__(self) -> int:
        return len(self._chunks)

    def insert(self, space: ChunkKey, chunks: Sequence[tuple[ChunkKey, TokenIds]]) -> None:
        """Makes ``chunks`` known to searches in ``space``, and to no others.

        A chunk shorter than a window has no anchor: it is reached from its neighbours.
        """
        polynomials = window_polynomials(np.concatenate([ids for _, ids in chunks]), self._window)
        starts = accumulate((len(ids) for _, ids in chunks), initial=0)
        offsets = [_offsets(len(ids), self._window) for _, ids in chunks]
        rows = [start + one for start, some in zip(starts, offsets, strict=False) for one in some]
        polynomials = polynomials[np.array(rows, np.intp)]
        hashes = hashes_in(space, polynomials)
        np.add.at(self._filter, _slots(hashes), np.uint32(1))
        values, donors, end = iter(hashes.tolist()), self._donors, 0
        for (key, _), some in zip(chunks, offsets, strict=True):
            self.newest = number = self.newest + _ROWS
            start, end = end, end + len(some)
            self._chunks[key] = _Anchors(space, number, some, polynomials[start:end])
            self._keys[number] = key
            for value, offset in zip(islice(values, len(some)), some, strict=True):
                known = donors.get(value)
                if known is None:
                    donors[value] = number - offset
                elif isinstance(known, int):
                    donors[value] = {known: None, number - offset: None}
                else:
                    known[number - offset] = None

    def remove(self, key: ChunkKey) -> None:
        anchors = self._chunks.pop(key)
        number = anchors.number
        del self._keys[number]
        for value, offset in anchors.windows():
            donors = self._donors[value]
            if isinstance(donors, int) or len(donors) == 1:
                del self._donors[value]
            else:
                del donors[number - offset]
            self._counts[value % _SLOTS] -= 1

    def has_any(self, space: ChunkKey, token_ids: TokenIds, newest: int = 0) -> bool:
        """Whether a window of these tokens has the hash of one that anchors a chunk: one that was
        inserted after the chunk that was the ``newest``."""
        hashes = hashes_in(space, window_polynomials(token_ids, self._window))
        (maybe,) = self._filter[_slots(hashes)].nonzero()
        for value in hashes[maybe].tolist():
            donors = self._donors.get(value, 0)
            if (donors if isinstance(donors, int) else next(reversed(donors))) > newest:
                return True
        return False

    def windows(self, keys: Sequence[ChunkKey]) -> Windows:
        """The windows by which ``keys``, which must be known here, are anchored."""
        some = [self._chunks[key] for key in keys]
        counts = np.array([len(one.offsets) for one in some])
        sizes = np.array([one.offsets[-1] + self._window if one.offsets else 0 for one in some])
        numbers = np.arange(counts.max(initial=0))
        are_there = numbers < counts[:, None]
        polynomials = np.zeros(are_there.shape, np.uint64)
        polynomials[are_there] = np.concatenate([one.polynomials for one in some])
        offsets = np.minimum(numbers * self._window, sizes[:, None] - self._window)
        offsets *= are_there
        return Windows(self._window, polynomials, offsets, counts, sizes)

    def find(
        self,
        tree: PrefixTree,
        spaces: Sequence[ChunkKey],
        token_ids: TokenIds,
        start: int = 0,
        order: bytes | None = None,
        polynomials: npt.NDArray[np.uint64] | None = None,
    ) -> list[Run]:
        """The runs of stored tokens in ``token_ids[start:]``, by where they begin. Each of
        ``spaces`` is searched only where nothing was found in those before it.

        A run is as long as its chunks allow; those of different donors may overlap. ``tree`` must
        hold every chunk that was inserted here. If they are at hand, ``order``: the tokens, and
        perhaps more that follow, as sortable bytes; and ``polynomials`` of the windows from
        ``start`` on.
        """
        window = self._window
        order = sortable(token_ids) if order is None else order
        if polynomials is None:
            polynomials = window_polynomials(token_ids[start:], window)
        runs: list[Run] = []
        for space in spaces:
            for first, end in _free(runs, start, len(token_ids), window):
                hashes = hashes_in(space, polynomials[first - start : end - start - window + 1])
                search = _Search(tree, self._chunks, token_ids[:end], order, first, window)
                self._follow_all(space, hashes, search)
                runs += search.runs
            runs.sort(key=_start)
        return runs

    def _follow_all(self, space: ChunkKey, hashes: npt.NDArray[np.uint64], search: _Search) -> None:
        """Follows the windows of a search, of which these are the ``hashes``."""
        window, all_donors = self._window, self._donors
        (maybe,) = self._filter[_slots(hashes)].nonzero()
        rows, values, first = (maybe + search.start).tolist(), hashes.data, search.start
        followed: dict[int, int] = {}  # by hash, at which row
        begins, seen = search.begins, search.seen
        # From the last row to the first: the newest donors of a text that repeats itself are at
        # its end, and what they contain comes before them.
        left = len(rows)
        while left:
            left -= 1
            row = rows[left]
            value, end = values[row - first], row + window
            donors = all_donors.get(value)
            if donors is None or followed.get(value, end) < end:
                continue
            followed[value] = row
            newest = (donors,) if isinstance(donors, int) else islice(reversed(donors), MAX_DONORS)
            for donor in newest:
                if seen.get(donor + row, end) > row:
                    number = -(-donor // _ROWS) * _ROWS
                    key = self._keys[number]
                    if self._chunks[key].space == space:
                        search.follow(key, row + donor - number, row)
            if len(begins) >= MAX_DONORS:
                # All runs end after this window. Skip earlier ones whose last token is in enough.
                left = bisect_left(rows, begins[MAX_DONORS - 1] - window + 1, 0, left)

    def check_integrity(self) -> list[str]:
        """The inconsistencies between chunks, donors and filter; empty when all is well."""
        problems = []
        filed = {
            (value, anchors.number - offset)
            for anchors in self._chunks.values()
            for value, offset in anchors.windows()
        }
        found = {
            (value, donor)
            for value, donors in self._donors.items()
            for donor in ((donors,) if isinstance(donors, int) else donors)
        }
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
        self,
        tree: PrefixTree,
        chunks: Mapping[ChunkKey, _Anchors],
        token_ids: TokenIds,
        order: bytes,
        start: int,
        window: int,
    ) -> None:
        self._tree = tree
        self._chunks = chunks
        self._window = window
        self._token_ids = token_ids
        self._order = order
        self.start = start
        self._end = len(token_ids)
        self.seen: dict[int, int] = {}  # by diagonal: its first row in a run
        self.begins: list[int] = []  # the first rows of the runs, sorted
        self.runs: list[Run] = []

    def follow(self, key: ChunkKey, base: int, row: int) -> None:
        """Adds the run that holds the window at ``row`` on this diagonal, which is a new one."""
        chunks, seen, nodes = self._chunks, self.seen, self._tree.nodes
        node = nodes[key]
        begin, end = self._agreement(node, base, row)
        if begin > row or end < row + self._window:  # other tokens of the same hash
            return
        seen[chunks[key].number + base] = begin
        pieces = [Piece(key, begin, begin - base, end - begin)]
        ended = end - base < len(node.token_ids)
        # What the chunks before it add, the last one first.
        while begin == base > self.start and (earlier := nodes.get(node.parent)) is not None:
            before, node = node.parent, earlier
            base = begin - len(node.token_ids)
            first, _ = self._agreement(node, base, begin - 1)
            if first == begin:  # not even the last token agrees
                break
            seen[chunks[before].number + base] = first
            pieces.append(Piece(before, first, first - base, begin - first))
            begin = first
        pieces.reverse()
        if not ended:  # what the chunks after it add
            for match in self._tree.match(key, self._token_ids, end, self._order):
                seen[chunks[match.key].number + end] = end
                pieces.append(Piece(match.key, end, 0, match.num_tokens))
                end += match.num_tokens
        insort(self.begins, begin)
        self.runs.append(Run(begin, end, tuple(pieces)))

    def _agreement(self, node: Node, base: int, row: int) -> tuple[int, int]:
        """The longest ``[begin, end)`` around ``row`` where chunk and prompt agree.

        If they differ at ``row`` itself, ``begin`` is after it.
        """
        tokens, first, last = node.token_ids, base, base + len(node.token_ids)
        if first >= self.start and last <= self._end:
            if self._order.startswith(node.order, base * TOKEN_BYTES):
                return first, last
        else:
            first, last = max(first, self.start), min(last, self._end)
        differ = (tokens[first - base : last - base] != self._token_ids[first:last]).tobytes()
        before, after = differ.rfind(1, 0, row - first + 1), differ.find(1, row - first + 1)
        return first + before + 1, last if after < 0 else first + after


_start = attrgetter("start")


@lru_cache(maxsize=1024)
def _offsets(num_tokens: int, window: int) -> tuple[int, ...]:
    """Where the windows of a chunk begin: every ``window`` tokens, and at its end."""
    last = num_tokens - window
    offsets = range(0, last + 1, window)
    return (*offsets, last) if last > 0 and last % window else tuple(offsets)


def _slots(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The slots of the filter that hashes fall into."""
    return (hashes & np.uint64(_SLOTS - 1)).view(np.int64)


def anchor_window(chunk_size: int) -> int:
    """The window for chunks of ``chunk_size`` tokens: smaller ones need smaller windows."""
    return min(WINDOW, 1 << (chunk_size.bit_length() - 1))


def _free(runs: Sequence[Run], start: int, end: int, least: int) -> list[tuple[int, int]]:
    """The rows of ``[start, end)`` that no run covers, where ``least`` or more are together."""
    free = []
    for first, last in [*((run.start, run.end) for run in runs), (end, end)]:
        if first - start >= least:
            free.append((start, first))
        start = max(start, last)
    return free
