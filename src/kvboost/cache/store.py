"""The chunk store: lookup with pins, admission under a budget.

Two locks. ``_lock`` guards the indexes, the tier and the pins, and is held for a few milliseconds
at most, the search of a long prompt. ``_admission`` lets one request at a time bring chunks in,
so that the copies it makes need not hold up anyone's lookup, and so that identical requests store
once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvboost.cache.anchors import WINDOW, AnchorIndex, Run
from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.eviction import LRU, EvictionPolicy
from kvboost.cache.index import PrefixIndex
from kvboost.cache.tiers.base import Tier
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, branch_key, chain_key

RowCopy = Callable[[int, int], torch.Tensor]
"""``copy(start, end)`` gives rows ``[start, end)`` of a request's KV as a tensor of its own,
``[2, layers, kv_heads, end - start, head_dim]``."""

Cut = Callable[[TokenIds, Sequence[int]], list[tuple[int, int]]]
"""Where a sequence is cut into chunks: ``[start, end)`` without gaps, none across the boundaries
given. What is cut off first must not depend on what comes later."""


@dataclass(frozen=True)
class Hit:
    """``num_tokens`` rows of ``chunk`` from ``offset`` on serve rows from ``start`` of a prompt."""

    chunk: KVChunk
    start: int
    num_tokens: int
    offset: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def kv(self) -> torch.Tensor:
        return self.chunk.kv[:, :, :, self.offset : self.offset + self.num_tokens]

    @property
    def distance(self) -> int:
        """How far these rows are moved."""
        return self.start - (self.chunk.base_position + self.offset)

    def clip(self, start: int, end: int) -> Hit:
        """The part of it that serves rows ``[start, end)``."""
        start, end = max(start, self.start), min(end, self.end)
        return Hit(self.chunk, start, end - start, self.offset + start - self.start)


@dataclass(frozen=True)
class MovedRun:
    """Rows of a prompt that stand together somewhere else. ``resemblance`` is how alike what
    stands before them here and there is: what both have in common over the longer of the two."""

    hits: tuple[Hit, ...]
    resemblance: float

    @property
    def start(self) -> int:
        return self.hits[0].start

    @property
    def end(self) -> int:
        return self.hits[-1].end

    @property
    def is_exact(self) -> bool:
        return all(hit.chunk.lineage is Lineage.EXACT for hit in self.hits)

    def clip(self, start: int, end: int) -> MovedRun:
        hits = (hit.clip(start, end) for hit in self.hits if hit.start < end and hit.end > start)
        return MovedRun(tuple(hits), self.resemblance)


@dataclass(frozen=True)
class Known:
    """What is known of a prompt. ``exact`` serves its beginning; ``approximate`` goes on from
    there, in place; ``moved`` runs stand behind both and may overlap one another."""

    exact: tuple[Hit, ...] = ()
    approximate: tuple[Hit, ...] = ()
    moved: tuple[MovedRun, ...] = ()

    @property
    def keys(self) -> list[ChunkKey]:
        hits = [*self.exact, *self.approximate, *(hit for run in self.moved for hit in run.hits)]
        return [hit.chunk.key for hit in hits]


@dataclass(frozen=True)
class _Part:
    """One chunk to be admitted: the ``depth``-th of its sequence."""

    depth: int
    start: int
    end: int
    lineage: Lineage
    branches: bool = False


class ChunkStore:
    def __init__(
        self,
        tier: Tier,
        *,
        cut: Cut,
        window: int = WINDOW,
        max_chunks: int | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._tier = tier
        self._cut = cut
        self._max_chunks = max_chunks
        self._policy: EvictionPolicy = policy or LRU()
        self._index = PrefixIndex()
        self._anchors = AnchorIndex(window)
        self._pins: Counter[ChunkKey] = Counter()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._admission = threading.Lock()

    @contextmanager
    def lookup(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        moved_before: int = 0,
        repair: str = "",
        pin: bool = True,
    ) -> Iterator[Known]:
        """What is known of ``token_ids``, pinned until the context is left: the beginning that is
        exact, and with ``moved_before`` also what goes on from there on top of moved rows
        (repaired in the way ``repair`` names), and what stands elsewhere of the rows before
        ``moved_before``.

        What is in place becomes younger; of moved runs a plan takes some, and tells ``touch``.
        ``pin=False`` only looks: nothing is pinned or becomes younger.
        """
        with self._lock:
            known = self._match(root, token_ids, moved_before, repair)
            keys = known.keys
            if pin:
                self._pins.update(keys)
                self._policy.touch(hit.chunk.key for hit in (*known.exact, *known.approximate))
        try:
            yield known
        finally:
            if pin:
                with self._lock:
                    self._unpin(keys)

    def touch(self, runs: Sequence[MovedRun]) -> None:
        """These moved runs serve a request: their chunks become younger."""
        with self._lock:
            for run in runs:
                self._policy.touch(hit.chunk.key for hit in run.hits)

    def admit(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        copy: RowCopy,
        *,
        exact_rows: int,
        repair: str = "",
        boundaries: Sequence[int] = (),
    ) -> int:
        """Keeps the KV of ``token_ids``, which begin a sequence; returns how many chunks are new.

        The first ``exact_rows`` are exact, the others were computed on top of moved ones: they go
        beside the exact tree, from the chunk on where they begin.

        Chunks that are known are skipped, a shorter one that a new one continues is replaced.
        When the budget is full of pinned chunks, or a copy fails, the rest is left out: the
        beginning of a text is worth more than its end.
        """
        new = 0
        path: list[ChunkKey] = []
        pinned: list[ChunkKey] = []
        with self._admission:
            try:
                for part in self._parts(self._cut(token_ids, boundaries), exact_rows):
                    parent = path[part.depth - 1] if part.depth else root
                    if part.branches:
                        parent = branch_key(parent, repair)
                    key, is_new = self._admit_one(root, parent, part, token_ids, copy)
                    if key is None:
                        break
                    new += is_new
                    path[part.depth :] = [key]
                    pinned.append(key)
            finally:
                with self._lock:
                    self._policy.touch(pinned)
                    self._unpin(pinned)
        return new

    def _parts(self, cuts: list[tuple[int, int]], exact_rows: int) -> Iterator[_Part]:
        """The chunks of a sequence. One in which exactness ends comes twice: its exact rows, and
        all of it as the first of the approximate ones::

            exact        |----|----|--|
            approximate            |----|----|
        """
        branched = False
        for depth, (start, end) in enumerate(cuts):
            if start < exact_rows:
                yield _Part(depth, start, min(end, exact_rows), Lineage.EXACT)
            if end > exact_rows:
                yield _Part(depth, start, end, Lineage.APPROXIMATE, branches=not branched)
                branched = True

    def _admit_one(
        self, root: ChunkKey, parent: ChunkKey, part: _Part, token_ids: TokenIds, copy: RowCopy
    ) -> tuple[ChunkKey | None, bool]:
        """The pinned chunk that holds ``part``, or None if it cannot be kept; and whether it is
        new."""
        ids = token_ids[part.start : part.end]
        with self._lock:
            known = self._known(parent, ids)
            if known is not None:
                self._pins[known] += 1
                return known, False
        try:
            kv = copy(part.start, part.end)
        except (MemoryError, RuntimeError):  # torch is out of memory
            with self._lock:
                self._counts["failed"] += 1
            return None, False
        # Ids of its own: a view would hold the whole prompt for as long.
        own_ids = as_token_ids(ids)
        chunk = KVChunk(chain_key(parent, ids), parent, own_ids, kv, part.start, part.lineage)
        with self._lock:
            if not self._insert(root, chunk):
                self._counts["rejected"] += 1
                return None, False
            self._pins[chunk.key] += 1
        return chunk.key, True

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "chunks": len(self._index),
                "nbytes": self._tier.nbytes,
                "pinned": len(self._pins),
                **{
                    name: self._counts[name]
                    for name in ("admitted", "evicted", "rejected", "failed", "lost")
                },
            }

    def forget(self, root: ChunkKey) -> None:
        """Forgets every chunk of ``root`` that is not in use right now."""
        with self._admission, self._lock:
            for key in [*self._anchors.keys(root), *self._anchors.keys(_approximate(root))]:
                if key not in self._pins:
                    self._drop(key)

    def clear(self) -> None:
        """Forgets everything that is not in use right now."""
        with self._admission, self._lock:
            for key in list(self._policy):
                if key not in self._pins:
                    self._drop(key)

    def close(self) -> None:
        self.clear()
        with self._admission, self._lock:
            self._tier.close()

    def check_integrity(self) -> list[str]:
        """What does not add up between index, tier, policy and pins; empty when all is well."""
        with self._admission, self._lock:
            problems = []
            indexed, held, ordered = (
                set(self._index.keys()),
                set(self._tier.keys()),
                set(self._policy),
            )
            if indexed != held or indexed != ordered:
                problems.append(
                    f"index {len(indexed)}, tier {len(held)} and policy {len(ordered)} differ"
                )
            held_chunks = [chunk for key in held if (chunk := self._tier.get(key)) is not None]
            nbytes = sum(chunk.nbytes for chunk in held_chunks)
            if nbytes != self._tier.nbytes:
                problems.append(f"tier says {self._tier.nbytes} bytes but holds {nbytes}")
            orphans = [
                chunk.key
                for chunk in held_chunks
                if chunk.lineage is Lineage.EXACT
                and chunk.base_position > 0
                and chunk.parent not in held
            ]
            if orphans:
                problems.append(f"{len(orphans)} chunks outlived their parents")
            problems += self._anchors.check_integrity()
            if len(self._anchors) != len(indexed):
                problems.append(f"{len(self._anchors)} chunks are anchored, {len(indexed)} indexed")
            if any(count <= 0 for count in self._pins.values()):
                problems.append(f"pins below zero: {dict(self._pins)}")
            return problems

    # Everything below is called with the lock held.

    def _match(self, root: ChunkKey, token_ids: TokenIds, moved_before: int, repair: str) -> Known:
        exact = self._walk(root, token_ids)
        if not moved_before:
            return Known(exact)
        approximate = self._continue(root, exact, token_ids, repair)
        in_place = [*exact, *approximate]
        start = in_place[-1].end if in_place else 0
        ids = token_ids[:moved_before]
        runs = self._anchors.find(self._index, root, ids, start)
        if not _covered(runs, start, moved_before):
            # Copies of copies only where there is no original.
            runs += self._anchors.find(self._index, _approximate(root), ids, start)
            runs.sort(key=lambda run: run.start)
        return Known(exact, approximate, self._moved(in_place, runs))

    def _walk(self, parent: ChunkKey, token_ids: TokenIds, start: int = 0) -> tuple[Hit, ...]:
        """Chunks below ``parent`` that serve ``token_ids`` from ``start`` on."""
        hits: list[Hit] = []
        for match in self._index.match(parent, token_ids[start:]):
            chunk = self._tier.get(match.key)
            if chunk is None:
                self._lose(match.key)
                break
            hits.append(Hit(chunk, start, match.num_tokens))
            start += match.num_tokens
        return tuple(hits)

    def _continue(
        self, root: ChunkKey, exact: tuple[Hit, ...], token_ids: TokenIds, repair: str
    ) -> tuple[Hit, ...]:
        """The approximate branch of the exact path that reaches furthest beyond it. A branch
        begins where a whole chunk ends."""
        end = exact[-1].end if exact else 0
        best: tuple[Hit, ...] = ()
        whole = (hit for hit in exact if hit.num_tokens == hit.chunk.num_tokens)
        forks = [(root, 0), *((hit.chunk.key, hit.end) for hit in whole)]
        for key, row in reversed(forks):
            hits = self._walk(branch_key(key, repair), token_ids, row)
            if hits and hits[-1].end > max(end, best[-1].end if best else 0):
                best = tuple(hit.clip(end, hit.end) for hit in hits if hit.end > end)
        return best

    def _moved(self, in_place: list[Hit], runs: list[Run]) -> tuple[MovedRun, ...]:
        """``runs``, by their starts, with their chunks, each cut off where a chunk is lost."""
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
                chunk = self._tier.get(piece.key) if piece.key in self._index else None
                if chunk is None:
                    if piece.key in self._index:
                        self._lose(piece.key)
                    break
                hits.append(Hit(chunk, piece.start, piece.num_tokens, piece.offset))
            if hits:
                moved.append(MovedRun(tuple(hits), self._resemblance(hits[0], before)))
        return tuple(moved)

    def _resemblance(self, hit: Hit, before: dict[ChunkKey, int]) -> float:
        """How much of what stands ``before`` a hit here stood before its donor too."""
        shared, key = 0, self._index.parent(hit.chunk.key)
        while before and key in self._index:
            shared += before.get(key, 0)
            key = self._index.parent(key)
        return min(1.0, shared / max(1, hit.start, hit.start - hit.distance))

    def _known(self, parent: ChunkKey, ids: TokenIds) -> ChunkKey | None:
        """A child of ``parent`` that begins with ``ids`` and is really there."""
        best = self._index.best_child(parent, ids)
        if best is None or best.num_tokens < len(ids):
            return None
        if not self._tier.contains(best.key):
            self._lose(best.key)
            return None
        return best.key

    def _insert(self, root: ChunkKey, chunk: KVChunk) -> bool:
        if chunk.nbytes > self._tier.max_bytes:
            return False
        while not self._fits(chunk):
            if not self._evict_one():
                return False
        shorter = self._index.leaf_extended_by(chunk.parent, chunk.token_ids)
        if shorter is not None and shorter not in self._pins:
            self._drop(shorter)
        if not self._tier.put(chunk):
            return False
        self._index.insert(chunk.key, chunk.parent, chunk.token_ids)
        space = root if chunk.lineage is Lineage.EXACT else _approximate(root)
        self._anchors.insert(space, chunk.key, chunk.token_ids)
        self._policy.add(chunk.key)
        self._counts["admitted"] += 1
        return True

    def _fits(self, chunk: KVChunk) -> bool:
        room = self._max_chunks is None or len(self._index) < self._max_chunks
        return room and self._tier.nbytes + chunk.nbytes <= self._tier.max_bytes

    def _evict_one(self) -> bool:
        for key in self._policy:
            if key not in self._pins and not self._index.has_children(key):
                self._drop(key)
                self._counts["evicted"] += 1
                return True
        return False

    def _lose(self, key: ChunkKey) -> None:
        """The tier no longer has ``key``: nothing behind it can be reached any more."""
        for gone in [*reversed(self._index.descendants(key)), key]:
            self._drop(gone)
            self._counts["lost"] += 1

    def _drop(self, key: ChunkKey) -> None:
        self._index.remove(key)
        self._anchors.remove(key)
        self._policy.remove(key)
        self._tier.delete(key)

    def _unpin(self, keys: list[ChunkKey]) -> None:
        self._pins.subtract(keys)
        for key in set(keys):
            if self._pins[key] <= 0:
                del self._pins[key]


def _approximate(root: ChunkKey) -> ChunkKey:
    """Where approximate chunks of ``root`` are anchored: they are asked after the exact ones."""
    return branch_key(root, "anchors")


def _covered(runs: list[Run], start: int, end: int) -> bool:
    """Whether ``runs``, by their starts, leave no window of rows ``[start, end)`` free."""
    for run in runs:
        if run.start - start >= WINDOW:
            return False
        start = max(start, run.end)
    return end - start < WINDOW
