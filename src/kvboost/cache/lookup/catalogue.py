"""The catalogue: every chunk there is, in whatever tier, and which of them a prompt contains.

Not thread-safe: the store holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvboost.cache.chunk import ChunkInfo, Lineage
from kvboost.cache.lookup.anchors import WINDOW, AnchorIndex, Run
from kvboost.cache.lookup.hits import EarlyLookup, Hit, KnownRows, MovedRun
from kvboost.cache.lookup.prefix_tree import PrefixTree, sortable
from kvboost.cache.lookup.resemblance import resemblances
from kvboost.cache.quantize import usable_rows
from kvboost.tokens.hashing import ChunkKey, TokenIds, branch_key, window_polynomials

Where = Callable[[ChunkKey], "str | None"]
"""The fastest tier that holds a chunk; None if it is lost."""


class Catalogue:
    def __init__(self, window: int, *, resumes: bool = False) -> None:
        """``resumes``: for a model with states, which can go on only where one is stored."""
        self._window = window
        self._resumes = resumes
        self.clear()

    def clear(self) -> None:
        self._infos: dict[ChunkKey, ChunkInfo] = {}
        self._tree = PrefixTree()
        self._anchors = AnchorIndex(self._window)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, key: object) -> bool:
        return key in self._infos

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._infos)

    def info(self, key: ChunkKey) -> ChunkInfo:
        return self._infos[key]

    def add(self, *infos: ChunkInfo) -> None:
        for info in infos:
            self._infos[info.key] = info
            self._tree.insert(info.key, info.parent, info.token_ids)
        for space, group in groupby(sorted(infos, key=_space), _space):
            self._anchors.insert(space, [(info.key, info.token_ids) for info in group])

    def remove(self, key: ChunkKey) -> None:
        """Forgets one chunk. Those after it stay: they serve again once it is back, and at other
        positions meanwhile."""
        del self._infos[key]
        self._tree.remove(key)
        self._anchors.remove(key)

    def describe(self, info: ChunkInfo) -> None:
        """Replaces what is known of a chunk by what was read from it."""
        if info.key in self._infos:
            self._infos[info.key] = info

    def leaf_extended_by(self, parent: ChunkKey, token_ids: TokenIds) -> ChunkKey | None:
        """A childless chunk below ``parent`` whose tokens are a prefix of ``token_ids``: a chunk of
        ``token_ids`` makes it useless."""
        return self._tree.leaf_extended_by(parent, token_ids)

    def sibling(
        self, parent: ChunkKey, token_ids: TokenIds, order: bytes | None = None
    ) -> tuple[ChunkKey, int] | None:
        """The child of ``parent`` that shares most leading tokens with ``token_ids``, and how
        many those are. ``order``: the tokens as sortable bytes, if they are at hand."""
        best = self._tree.best_child(parent, token_ids, order)
        return (best.key, best.num_tokens) if best else None

    def infos(self) -> dict[ChunkKey, ChunkInfo]:
        """A copy of what is known, which can be searched without the lock."""
        return dict(self._infos)

    def match(
        self, root: ChunkKey, token_ids: TokenIds, moved_before: int, repair: str, where: Where
    ) -> KnownRows:
        """The stored rows for ``token_ids``: see ``ChunkStore.lookup``. Leaves out what is lost.

        A hit says what its chunk must be: its position follows from the chunks before it, its
        lineage from the branch. A chunk that says otherwise of itself is refused when it is read.
        """
        order = sortable(token_ids)
        exact = self._walk(root, root, Lineage.EXACT, token_ids, order, 0, where)
        if self._resumes:
            matched = exact[-1].end if exact else 0
            return KnownRows(self._up_to_state(root, token_ids, where), matched=matched)
        if not moved_before:
            return KnownRows(exact)
        approximate = self._continue(root, exact, token_ids, order, repair, where)
        in_place = [*exact, *approximate]
        start = in_place[-1].end if in_place else 0
        ids = token_ids[:moved_before]
        # Copies of copies only where there is no original.
        spaces = (root, _approximate(root))
        polynomials = window_polynomials(ids[start:], self._window)
        runs = self._anchors.find(self._tree, spaces, ids, start, order, polynomials)
        moved = self._moved(runs, where)
        if not moved:
            return KnownRows(exact, approximate)
        earlier = window_polynomials(ids[: start + self._window - 1], self._window)
        polynomials = np.concatenate([earlier, polynomials])
        alike = resemblances([hits[0] for hits in moved], self._infos, self._anchors, polynomials)
        moved_runs = tuple(MovedRun(*one) for one in zip(moved, alike, strict=True))
        return KnownRows(exact, approximate, moved_runs)

    @property
    def newest(self) -> int:
        """Names the chunk that was added last."""
        return self._anchors.newest

    def is_current(
        self,
        early: EarlyLookup,
        root: ChunkKey,
        token_ids: TokenIds,
        moved_before: int,
        repair: str,
        where: Where,
    ) -> bool:
        """Whether an early match still holds: every chunk is where it was, and those added since
        neither have text that is not covered yet nor serve more rows in place. Not for models with
        states. A longer prefix that is cut elsewhere, before its last chunk, is overlooked."""
        known = early.known
        if early.newest != self.newest:
            gaps = known.gaps(moved_before, self._window)
            if self._has_newer(root, token_ids, gaps, early.newest):
                return False
            last = known.exact[-1] if known.exact else None
            parent, start = (root, 0) if last is None else (last.chunk.parent, last.start)
            order = sortable(token_ids)
            found = self._walk(root, parent, Lineage.EXACT, token_ids, order, start, where)
            if found and (last is None or found[-1].end > last.end):
                return False
            if moved_before:
                more = self._continue(root, known.exact, token_ids, order, repair, where)
                if more and more[-1].end > (known.in_place[-1].end if known.in_place else 0):
                    return False
        return all(where(hit.chunk.key) == hit.tier for hit in known.hits())

    def in_place(
        self, root: ChunkKey, token_ids: TokenIds, repair: str, where: Where
    ) -> tuple[Hit, ...]:
        """The chunks that hold the beginning of ``token_ids`` at its own position: the exact prefix
        and the approximate rows that continue it."""
        order = sortable(token_ids)
        if self._resumes:
            return self._up_to_state(root, token_ids, where)
        exact = self._walk(root, root, Lineage.EXACT, token_ids, order, 0, where)
        return (*exact, *self._continue(root, exact, token_ids, order, repair, where))

    def following(
        self, root: ChunkKey, in_place: Sequence[Hit], token_ids: TokenIds, least: int
    ) -> TokenIds:
        """The next tokens, ``least`` or more if there are as many, of the cached text that begins
        with the ``in_place`` hits of a prompt. Where it branches, of the branch that shares most
        with the prompt."""
        if not in_place:
            return self._tree.following(root, token_ids, least)
        last = in_place[-1]
        rest = last.chunk.token_ids[last.offset + last.num_tokens :]
        if len(rest) >= least:
            return rest
        wanted = token_ids[:0] if len(rest) else token_ids[last.end :]
        more = self._tree.following(last.chunk.key, wanted, least - len(rest))
        return np.concatenate([rest, more])

    def elsewhere(
        self, root: ChunkKey, token_ids: TokenIds, row: int, but: Collection[ChunkKey]
    ) -> list[tuple[int, int]]:
        """The rows ``[start, end)`` from ``row`` on that are cached at any position, except in the
        chunks of the prompt itself: those that ``but`` does not name are left out."""
        own = {match.key for match in self._tree.match(root, token_ids)} - set(but)
        runs = self._anchors.find(self._tree, (root, _approximate(root)), token_ids, row)
        return [
            (piece.start, piece.start + piece.num_tokens)
            for run in runs
            for piece in run.pieces
            if piece.key not in own
        ]

    def known_under(self, root: ChunkKey, token_ids: TokenIds, row: int) -> list[tuple[int, int]]:
        """The rows from ``row`` on that are cached under ``root``, at any position."""
        end = sum(match.num_tokens for match in self._tree.match(root, token_ids))
        runs = self._anchors.find(self._tree, (root,), token_ids, row)
        prefix = [(row, end)] if end > row else []
        return [*prefix, *((run.start, run.end) for run in runs)]

    def may_hold(self, root: ChunkKey, token_ids: TokenIds) -> bool:
        """Whether a window of these tokens anchors an exact chunk of ``root``."""
        return self._anchors.has_any(root, token_ids)

    def before(self, key: ChunkKey, offset: int, count: int) -> TokenIds:
        """The ``count`` tokens before token ``offset`` of a chunk, as far as they are known."""
        info = self._infos.get(key)
        if info is None:
            return np.empty(0, np.int32)
        ids = np.concatenate([_before(self._infos, info, count - offset), info.token_ids[:offset]])
        return ids[-count:]

    def superseded(self, root: ChunkKey, token_ids: TokenIds, repair: str) -> list[ChunkKey]:
        """Approximate chunks that hold nothing but text of which ``token_ids`` are the exact path,
        the last first: chunks of the branches (repaired as ``repair`` says) that begin on that
        path. Those after a chunk that some other text continues come before it."""
        found: list[ChunkKey] = []
        row, fork = 0, root
        for match in [*self._tree.match(root, token_ids), None]:
            branch: list[ChunkKey] = []
            for copy in self._tree.match(branch_key(fork, repair), token_ids[row:]):
                if copy.num_tokens == self._infos[copy.key].num_tokens:
                    branch.append(copy.key)
            found += reversed(branch)
            if match is None or match.num_tokens < self._infos[match.key].num_tokens:
                break
            row, fork = row + match.num_tokens, match.key
        return found

    def num_children(self, key: ChunkKey) -> int:
        """The number of chunks that continue this one."""
        return self._tree.num_children(key)

    def check_integrity(self) -> list[str]:
        problems = self._anchors.check_integrity()
        if not len(self._anchors) == len(self._tree) == len(self._infos):
            problems.append(
                f"{len(self._infos)} chunks, {len(self._tree)} in the tree, "
                f"{len(self._anchors)} anchored"
            )
        for info in self._infos.values():
            before = self._infos.get(info.before)
            if before is not None and before.end != info.base_position:
                problems.append(f"{info.key} does not begin where {before.key} ends")
        return problems

    def _has_newer(
        self, root: ChunkKey, token_ids: TokenIds, gaps: Sequence[tuple[int, int]], newest: int
    ) -> bool:
        """Whether a chunk that was added after ``newest`` seems to have text of these rows."""
        more = self._window - 1
        return any(
            self._anchors.has_any(space, token_ids[max(0, start - more) : end + more], newest)
            for start, end in gaps
            for space in (root, _approximate(root))
        )

    def _walk(
        self,
        root: ChunkKey,
        parent: ChunkKey,
        lineage: Lineage,
        token_ids: TokenIds,
        order: bytes,
        start: int,
        where: Where,
    ) -> tuple[Hit, ...]:
        """The chunks below ``parent`` that serve ``token_ids``, as sortable bytes ``order``, from
        ``start`` on."""
        hits: list[Hit] = []
        for match in self._tree.match(parent, token_ids, start, order):
            info, tier = self._infos[match.key], where(match.key)
            num_tokens = usable_rows(info.bits, info.num_tokens, match.num_tokens)
            if tier is None or num_tokens == 0:
                break
            if (info.root, info.lineage, info.base_position) != (root, lineage, start):
                info = replace(info, root=root, lineage=lineage, base_position=start)
            hits.append(Hit(info, start, num_tokens, tier=tier))
            start += num_tokens
        return tuple(hits)

    def _up_to_state(self, root: ChunkKey, token_ids: TokenIds, where: Where) -> tuple[Hit, ...]:
        """The whole chunks at the beginning of ``token_ids``, up to the last one with states. The
        same text may be cut in several ways, so all of them are followed."""
        path: list[tuple[int, Hit]] = []  # each with the number of the one before it
        best = -1
        left: list[tuple[ChunkKey, int]] = [(root, -1)]
        while left:
            parent, before = left.pop()
            start = path[before][1].end if before >= 0 else 0
            for key in self._tree.whole_children(parent, token_ids[start:]):
                info, tier = self._infos[key], where(key)
                if tier is None or info.lineage is not Lineage.EXACT:
                    continue
                if (info.root, info.base_position) != (root, start):
                    info = replace(info, root=root, base_position=start)
                path.append((before, Hit(info, start, info.num_tokens, tier=tier)))
                number = len(path) - 1
                if info.has_state and (best < 0 or path[best][1].end < start + info.num_tokens):
                    best = number
                left.append((key, number))
        hits: list[Hit] = []
        while best >= 0:
            best, hit = path[best]
            hits.append(hit)
        return tuple(reversed(hits))

    def _continue(
        self,
        root: ChunkKey,
        exact: tuple[Hit, ...],
        token_ids: TokenIds,
        order: bytes,
        repair: str,
        where: Where,
    ) -> tuple[Hit, ...]:
        """The approximate branch of the exact path that reaches furthest beyond it. A branch starts
        at the end of a whole chunk."""
        end = exact[-1].end if exact else 0
        best: tuple[Hit, ...] = ()
        whole = (hit for hit in exact if hit.num_tokens == hit.chunk.num_tokens)
        forks = [(root, 0), *((hit.chunk.key, hit.end) for hit in whole)]
        for key, row in reversed(forks):
            branch = branch_key(key, repair)
            hits = self._walk(root, branch, Lineage.APPROXIMATE, token_ids, order, row, where)
            if hits and hits[-1].end > max(end, best[-1].end if best else 0):
                best = tuple(hit.clip(end, hit.end) for hit in hits if hit.end > end)
        return best

    def _moved(self, runs: Sequence[Run], where: Where) -> list[tuple[Hit, ...]]:
        """The hits of ``runs``, by their starts, each cut off where a chunk is lost."""
        infos, moved = self._infos, []
        for run in runs:
            hits: list[Hit] = []
            for key, start, offset, num_tokens in run.pieces:
                if (tier := where(key)) is None:
                    break
                info = infos[key]
                earlier = infos.get(info.before)
                if earlier is not None and earlier.end != info.base_position:
                    info = self._at_its_position(info, earlier)
                hits.append(Hit(info, start, num_tokens, offset, tier))
            if hits:
                moved.append(tuple(hits))
        return moved

    def _at_its_position(self, info: ChunkInfo, before: ChunkInfo) -> ChunkInfo:
        """``info`` with the position that follows from the chunk ``before`` it, if that does not
        contradict the one before it in turn."""
        earlier = self._infos.get(before.before)
        if earlier is not None and earlier.end != before.base_position:
            return info
        return replace(info, base_position=before.end)


def preceding(
    infos: Mapping[ChunkKey, ChunkInfo], info: ChunkInfo, *, parents: bool = False
) -> Iterator[ChunkInfo]:
    """The chunks before ``info``, the nearest first, as far as they are known; with ``parents``
    only those of its own branch. Each must have an earlier position than the last, so this ends
    whatever the files say: no hash covers ``before``."""
    while True:
        earlier = infos.get(info.parent if parents else info.before)
        if earlier is None or earlier.base_position >= info.base_position:
            return
        yield earlier
        info = earlier


def holding(infos: Mapping[ChunkKey, ChunkInfo], texts: Sequence[TokenIds]) -> list[ChunkKey]:
    """Every chunk of ``infos`` that contains a piece of one of ``texts`` (all of it, or ``WINDOW``
    consecutive tokens), in whatever tree, and every chunk that follows such a chunk. Also every
    chunk whose beginning is lost, since it may have followed one."""
    pieces = {piece.tobytes() for ids in texts for piece in _windows(ids, min(WINDOW, len(ids)))}
    lengths = sorted({min(WINDOW, len(ids)) for ids in texts})
    found: dict[ChunkKey, None] = {}
    following: dict[ChunkKey, list[ChunkKey]] = {}
    for info in infos.values():
        following.setdefault(info.before, []).append(info.key)
        if info.base_position and info.before not in infos:
            found[info.key] = None
        before = _before(infos, info, lengths[-1] - 1)
        ids = np.concatenate([before, info.token_ids])
        for length in lengths:
            for start, one in enumerate(_windows(ids, length)):
                if one.tobytes() in pieces:
                    found |= dict.fromkeys(_back_to(infos, info, start - len(before)))
                    break
    left = list(found)
    while left:
        new = [key for key in following.get(left.pop(), ()) if key not in found]
        found |= dict.fromkeys(new)
        left += new
    return list(found)


def _back_to(infos: Mapping[ChunkKey, ChunkInfo], info: ChunkInfo, row: int) -> Iterator[ChunkKey]:
    """A chunk, and those before it back to the one that holds ``row``, counted from the chunk's
    first row; rows before it are negative."""
    yield info.key
    for earlier in preceding(infos, info):
        if row >= 0:
            return
        row += earlier.num_tokens
        yield earlier.key


def _before(infos: Mapping[ChunkKey, ChunkInfo], info: ChunkInfo, num_tokens: int) -> TokenIds:
    """The ``num_tokens`` before a chunk, as far as they are known."""
    pieces: list[TokenIds] = []
    missing = num_tokens
    for earlier in preceding(infos, info):
        if missing <= 0:
            break
        pieces.insert(0, earlier.token_ids[-missing:])
        missing -= len(pieces[0])
    return np.concatenate([*pieces, np.empty(0, np.int32)])


def _windows(token_ids: TokenIds, length: int) -> npt.NDArray[np.int32]:
    """All runs of ``length`` consecutive ``token_ids``: ``[windows, length]``."""
    if len(token_ids) < length:
        return np.empty((0, length), np.int32)
    return np.lib.stride_tricks.sliding_window_view(token_ids, length)


def _space(info: ChunkInfo) -> ChunkKey:
    """The space in which a chunk is anchored."""
    return info.root if info.lineage is Lineage.EXACT else _approximate(info.root)


def _approximate(root: ChunkKey) -> ChunkKey:
    """The space in which approximate chunks of ``root`` are anchored. It is searched after the
    exact ones."""
    return branch_key(root, "anchors")
