"""The catalogue: every chunk there is, wherever it lies, and what of them stands in a prompt.

Not thread-safe: the store holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvboost.cache.chunk import ChunkInfo, Lineage
from kvboost.cache.lookup.anchors import WINDOW, AnchorIndex, Run
from kvboost.cache.lookup.hits import Hit, KnownRows, MovedRun
from kvboost.cache.lookup.prefix_tree import PrefixTree
from kvboost.cache.quantize import usable_rows
from kvboost.tokens.hashing import ChunkKey, TokenIds, branch_key

Where = Callable[[ChunkKey], "str | None"]
"""The fastest tier a chunk lies in; None if it is lost."""


class Catalogue:
    def __init__(self, window: int) -> None:
        self._window = window
        self.clear()

    def clear(self) -> None:
        self._infos: dict[ChunkKey, ChunkInfo] = {}
        self._tree = PrefixTree()
        self._anchors = AnchorIndex(self._window)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._infos

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._infos)

    def info(self, key: ChunkKey) -> ChunkInfo:
        return self._infos[key]

    def add(self, info: ChunkInfo) -> None:
        self._infos[info.key] = info
        self._tree.insert(info.key, info.parent, info.token_ids)
        exact = info.lineage is Lineage.EXACT
        space = info.root if exact else _approximate(info.root)
        self._anchors.insert(space, info.key, info.token_ids)

    def remove(self, key: ChunkKey) -> None:
        """Forgets one chunk. Those behind it stay: they serve again once it is back, and other
        places meanwhile."""
        del self._infos[key]
        self._tree.remove(key)
        self._anchors.remove(key)

    def describe(self, info: ChunkInfo) -> None:
        """More is known of a chunk than when it was added."""
        if info.key in self._infos:
            self._infos[info.key] = info

    def of_root(self, root: ChunkKey) -> list[ChunkKey]:
        return [key for key, info in self._infos.items() if info.root == root]

    def leaf_extended_by(self, parent: ChunkKey, token_ids: TokenIds) -> ChunkKey | None:
        """A childless sibling whose tokens ``token_ids`` begin with: of no use beside them."""
        return self._tree.leaf_extended_by(parent, token_ids)

    def sibling(self, parent: ChunkKey, token_ids: TokenIds) -> tuple[ChunkKey, int] | None:
        """The child of ``parent`` that shares most leading tokens with ``token_ids``, and how
        many those are."""
        best = self._tree.best_child(parent, token_ids)
        return (best.key, best.num_tokens) if best else None

    def path(self, root: ChunkKey, token_ids: TokenIds) -> list[ChunkKey]:
        """The chunks that begin with ``token_ids``, exactly, the last perhaps in part."""
        return [match.key for match in self._tree.match(root, token_ids)]

    def infos(self) -> dict[ChunkKey, ChunkInfo]:
        """A copy of what is known, to be searched without holding anyone up."""
        return dict(self._infos)

    def match(
        self, root: ChunkKey, token_ids: TokenIds, moved_before: int, repair: str, where: Where
    ) -> KnownRows:
        """What is known of ``token_ids``: see ``ChunkStore.lookup``. Nothing that is lost."""
        exact = self._walk(root, token_ids, 0, where)
        if not moved_before:
            return KnownRows(exact)
        approximate = self._continue(root, exact, token_ids, repair, where)
        in_place = [*exact, *approximate]
        start = in_place[-1].end if in_place else 0
        ids = token_ids[:moved_before]
        runs = self._anchors.find(self._tree, root, ids, start)
        if not _covered(runs, start, moved_before):
            # Copies of copies only where there is no original.
            runs += self._anchors.find(self._tree, _approximate(root), ids, start)
            runs.sort(key=lambda run: run.start)
        return KnownRows(exact, approximate, self._moved(in_place, runs, where))

    def check_integrity(self) -> list[str]:
        problems = self._anchors.check_integrity()
        if not len(self._anchors) == len(self._tree) == len(self._infos):
            problems.append(
                f"{len(self._infos)} chunks, {len(self._tree)} in the tree, "
                f"{len(self._anchors)} anchored"
            )
        before = ((info, self._infos.get(info.before)) for info in self._infos.values())
        for info, one in before:
            if one is not None and one.base_position + one.num_tokens != info.base_position:
                problems.append(f"{info.key} does not begin where {one.key} ends")
        return problems

    def _walk(
        self, parent: ChunkKey, token_ids: TokenIds, start: int, where: Where
    ) -> tuple[Hit, ...]:
        """Chunks below ``parent`` that serve ``token_ids`` from ``start`` on."""
        hits: list[Hit] = []
        for match in self._tree.match(parent, token_ids[start:]):
            info, tier = self._infos[match.key], where(match.key)
            num_tokens = usable_rows(info.bits, info.num_tokens, match.num_tokens)
            if tier is None or num_tokens == 0 or info.base_position != start:
                break
            hits.append(Hit(info, start, num_tokens, tier=tier))
            start += num_tokens
        return tuple(hits)

    def _continue(
        self,
        root: ChunkKey,
        exact: tuple[Hit, ...],
        token_ids: TokenIds,
        repair: str,
        where: Where,
    ) -> tuple[Hit, ...]:
        """The approximate branch of the exact path that reaches furthest beyond it. A branch
        begins where a whole chunk ends."""
        end = exact[-1].end if exact else 0
        best: tuple[Hit, ...] = ()
        whole = (hit for hit in exact if hit.num_tokens == hit.chunk.num_tokens)
        forks = [(root, 0), *((hit.chunk.key, hit.end) for hit in whole)]
        for key, row in reversed(forks):
            hits = self._walk(branch_key(key, repair), token_ids, row, where)
            if hits and hits[-1].end > max(end, best[-1].end if best else 0):
                best = tuple(hit.clip(end, hit.end) for hit in hits if hit.end > end)
        return best

    def _moved(
        self, in_place: Sequence[Hit], runs: Sequence[Run], where: Where
    ) -> tuple[MovedRun, ...]:
        """``runs``, by their starts, each cut off where a chunk is lost."""
        stands = [(hit.end, hit.chunk.key, hit.num_tokens) for hit in in_place]
        for run in runs:
            stands += [(one.start + one.num_tokens, one.key, one.num_tokens) for one in run.pieces]
        stands.sort(reverse=True)
        before: dict[ChunkKey, int] = {}  # chunks that end where a run begins or earlier
        moved = []
        for run in runs:
            while stands and stands[-1][0] <= run.start:
                _, key, num_tokens = stands.pop()
                before[key] = num_tokens
            hits: list[Hit] = []
            for piece in run.pieces:
                if (tier := where(piece.key)) is None:
                    break
                info = self._infos[piece.key]
                hits.append(Hit(info, piece.start, piece.num_tokens, piece.offset, tier))
            if hits:
                moved.append(MovedRun(tuple(hits), self._resemblance(hits[0], before)))
        return tuple(moved)

    def _resemblance(self, hit: Hit, before: dict[ChunkKey, int]) -> float:
        """How much of what stands ``before`` a hit here stood before its donor too."""
        shared, key = 0, hit.chunk.parent
        while before and key in self._infos:
            shared += before.get(key, 0)
            key = self._infos[key].parent
        return min(1.0, shared / max(1, hit.start, hit.start - hit.distance))


def holding(infos: Mapping[ChunkKey, ChunkInfo], texts: Sequence[TokenIds]) -> list[ChunkKey]:
    """Every chunk of ``infos`` that holds a piece of one of ``texts`` (all of it, or ``WINDOW``
    tokens in a row), in whatever tree, and every chunk that was read behind one. So is every chunk
    whose beginning is lost: nobody can say what it was read behind."""
    pieces = {piece.tobytes() for ids in texts for piece in _windows(ids, min(WINDOW, len(ids)))}
    lengths = sorted({min(WINDOW, len(ids)) for ids in texts})
    found: dict[ChunkKey, None] = {}
    behind: dict[ChunkKey, list[ChunkKey]] = {}
    for info in infos.values():
        behind.setdefault(info.before, []).append(info.key)
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
        new = [key for key in behind.get(left.pop(), ()) if key not in found]
        found |= dict.fromkeys(new)
        left += new
    return list(found)


def _back_to(infos: Mapping[ChunkKey, ChunkInfo], info: ChunkInfo, row: int) -> Iterator[ChunkKey]:
    """A chunk, and those before it back to the one that holds ``row``, counted from its first;
    rows before it are negative."""
    yield info.key
    while row < 0:
        info = infos[info.before]
        row += info.num_tokens
        yield info.key


def _before(infos: Mapping[ChunkKey, ChunkInfo], info: ChunkInfo, num_tokens: int) -> TokenIds:
    """The ``num_tokens`` before a chunk, as far as they are known."""
    pieces: list[TokenIds] = []
    missing = num_tokens
    while missing > 0 and (before := infos.get(info.before)) is not None:
        pieces.insert(0, before.token_ids[-missing:])
        missing -= len(pieces[0])
        info = before
    return np.concatenate([*pieces, np.empty(0, np.int32)])


def _windows(token_ids: TokenIds, length: int) -> npt.NDArray[np.int32]:
    """All ``length`` tokens in a row of ``token_ids``: ``[windows, length]``."""
    if len(token_ids) < length:
        return np.empty((0, length), np.int32)
    return np.lib.stride_tricks.sliding_window_view(token_ids, length)


def _approximate(root: ChunkKey) -> ChunkKey:
    """Where approximate chunks of ``root`` are anchored: they are asked after the exact ones."""
    return branch_key(root, "anchors")


def _covered(runs: Sequence[Run], start: int, end: int) -> bool:
    """Whether ``runs``, by their starts, leave no window of rows ``[start, end)`` free."""
    for run in runs:
        if run.start - start >= WINDOW:
            return False
        start = max(start, run.end)
    return end - start < WINDOW
