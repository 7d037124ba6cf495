"""The chunk store: lookup with pins, fetching, admission, forgetting.

Locks, in this order. ``_admission`` lets one request at a time bring chunks in, so that the copies
it makes hold up no lookup, and identical requests store once. ``_lock`` guards catalogue, shelves,
tiers in memory and pins, and is held for a few milliseconds at most, the search of a long prompt;
never while a file is read or written or a network is waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage, Origin
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.eviction.policy import EvictionPolicy
from kvboost.cache.lookup.anchors import WINDOW
from kvboost.cache.lookup.catalogue import Catalogue, holding
from kvboost.cache.lookup.hits import Hit, KnownRows
from kvboost.cache.quantize import KVData
from kvboost.cache.tiers.hierarchy import Hierarchy
from kvboost.cache.tiers.open import Tiers
from kvboost.errors import ForgetError
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, branch_key, chain_key

Pack = Callable[[int, int, "KVData | None", int], KVData]
"""``pack(start, end, like, common)`` gives rows ``[start, end)`` of a request's KV in memory of
their own; the first ``common`` of them are those of ``like``."""

Cut = Callable[[TokenIds, Sequence[int]], list[tuple[int, int]]]
"""Where a sequence is cut into chunks: ``[start, end)`` without gaps, none across the boundaries
given. What is cut off first must not depend on what comes later."""


class ChunkLost(Exception):
    """A chunk that was found cannot be had any more: the prompt must be planned again."""


@dataclass(frozen=True)
class _Part:
    """One chunk to be admitted: the ``depth``-th of its sequence."""

    depth: int
    start: int
    end: int
    lineage: Lineage
    branches: bool = False
    is_parent: bool = False
    """Whether another one goes on from it: it must then end where it ends."""


class ChunkStore:
    def __init__(
        self,
        tiers: Tiers,
        *,
        cut: Cut,
        origin: Origin,
        window: int = WINDOW,
        max_chunks: int | None = None,
        policy: Callable[[], EvictionPolicy] = LearnedPolicy,
        attention_share: float = 0.0,
    ) -> None:
        """``origin`` names the model; of other models' chunks on a shared disk only the bytes
        matter. ``max_chunks`` bounds memory, beside its bytes. ``attention_share`` is what
        attending to one token costs, in rows computed: chunks far behind are dearer."""
        self._cut = cut
        self._origin = origin
        self._catalogue = Catalogue(window)
        self._pins: Counter[ChunkKey] = Counter()  # by requests, while they copy
        self._kept: Counter[ChunkKey] = Counter()  # by the user, until unpinned
        self._counts: Counter[str] = Counter()
        self.epoch = 0
        """How often something was forgotten."""
        self._closed = False
        self._lock = threading.RLock()
        self._admission = threading.Lock()
        self._places = Hierarchy(
            tiers,
            self,
            self._lock,
            policy=policy,
            max_chunks=max_chunks,
            attention_share=attention_share,
        )
        self._places.open()

    @contextmanager
    def lookup(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        moved_before: int = 0,
        repair: str = "",
        pin: bool = True,
        ask_remote: bool = True,
    ) -> Iterator[KnownRows]:
        """What is known of ``token_ids``, pinned until the context is left: the beginning that is
        exact, and with ``moved_before`` also what goes on from there on top of moved rows
        (repaired in the way ``repair`` names), and what stands elsewhere of the rows before
        ``moved_before``.

        What is used of it is told by ``touch``. ``pin=False`` only looks. ``ask_remote=False``
        leaves a remote store alone, which may say it has what it then does not give.
        """
        self._places.refresh()
        far = self._ask_remote(root, token_ids) if ask_remote else []
        with self._lock:
            known = self._match(root, token_ids, moved_before, repair)
            keys = list(known.keys()) if pin else []
            self._pins.update(keys)
        try:
            yield known
        finally:
            with self._lock:
                self._unpin(keys)
                self._places.forget_far([*far, *keys])

    def fetch(self, hits: Sequence[Hit]) -> Iterator[tuple[Hit, KVData]]:
        """The data of pinned hits, in order; what lies on slow tiers is read ahead meanwhile.
        Raises ``ChunkLost`` when one cannot be had; it is forgotten then."""
        chunks = self._places.fetch([hit.chunk.key for hit in hits])
        for hit, chunk in zip(hits, chunks, strict=True):
            if chunk is None:
                raise ChunkLost(hit.chunk.key)
            yield hit, chunk.data

    def touch(self, *paths: Sequence[Hit]) -> None:
        """These hits serve a request, each path from front to end: they become younger."""
        with self._lock:
            for path in paths:
                self._places.touch([hit.chunk.key for hit in path])

    def admit(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        pack: Pack,
        *,
        exact_rows: int,
        repair: str = "",
        boundaries: Sequence[int] = (),
        epoch: int | None = None,
        wait: bool = True,
    ) -> int:
        """Keeps the KV of ``token_ids``, which begin a sequence; returns how many chunks are new.

        The first ``exact_rows`` are exact, the others were computed on top of moved ones: they go
        beside the exact tree, from the chunk on where they begin.

        Chunks that are known are skipped, a shorter one that a new one continues is replaced.
        When the budget is full of pinned chunks, or a copy fails, the rest is left out: the
        beginning of a text is worth more than its end. Nothing is kept of a request that began
        in an earlier ``epoch``, before something was forgotten: it may hold that. Without ``wait``,
        nothing is kept while another request's chunks come in or something is being forgotten.
        """
        new = 0
        path: list[ChunkKey] = []
        pinned: list[ChunkKey] = []
        if not self._admission.acquire(blocking=wait):
            return 0
        try:
            if self._closed or epoch not in (None, self.epoch):
                return 0
            try:
                for part in self._parts(self._cut(token_ids, boundaries), exact_rows):
                    before = path[part.depth - 1] if part.depth else root
                    parent = branch_key(before, repair) if part.branches else before
                    key, is_new = self._admit_one(root, before, parent, part, token_ids, pack)
                    if key is None:
                        break
                    new += is_new
                    path[part.depth :] = [key]
                    pinned.append(key)
            finally:
                with self._lock:
                    self._places.settle()
                    self._unpin(pinned)
        finally:
            self._admission.release()
        return new

    def _parts(self, cuts: list[tuple[int, int]], exact_rows: int) -> Iterator[_Part]:
        """The chunks of a sequence. One in which exactness ends comes twice: its exact rows, and
        all of it as the first of the approximate ones::

            exact        |----|----|--|
            approximate            |----|----|
        """
        branched = False
        for depth, (start, end) in enumerate(cuts):
            goes_on = depth + 1 < len(cuts)
            if start < exact_rows:
                is_parent = goes_on and end <= exact_rows
                yield _Part(depth, start, min(end, exact_rows), Lineage.EXACT, is_parent=is_parent)
            if end > exact_rows:
                inexact = Lineage.APPROXIMATE
                yield _Part(depth, start, end, inexact, not branched, is_parent=goes_on)
                branched = True

    def _admit_one(
        self,
        root: ChunkKey,
        before: ChunkKey,
        parent: ChunkKey,
        part: _Part,
        token_ids: TokenIds,
        pack: Pack,
    ) -> tuple[ChunkKey | None, bool]:
        """The pinned chunk that holds ``part``, or None if it cannot be kept; and whether it is
        new."""
        # Ids of its own: a view would hold the whole prompt for as long.
        ids = as_token_ids(token_ids[part.start : part.end])
        like: KVData | None = None
        with self._lock:
            sibling, common = self._sibling(parent, ids)
            if sibling is not None and common == len(ids):
                length = self._catalogue.info(sibling).num_tokens
                if length == len(ids) or not part.is_parent:
                    self._pins[sibling] += 1
                    return sibling, False
            if sibling is not None and (chunk := self._places.ready(sibling)) is not None:
                like = chunk.data
        try:
            data = pack(part.start, part.end, like, common)
            key = chain_key(parent, ids)
            described = ChunkInfo(
                key,
                parent,
                before,
                root,
                ids,
                part.start,
                part.lineage,
                data.bits,
                data.nbytes,
                self._origin,
                data.key_norm,
            )
            chunk = KVChunk(described, data)
            in_ram = self._places.adopt(chunk)
        except (MemoryError, RuntimeError):  # torch is out of memory
            with self._lock:
                self._counts["failed"] += 1
            return None, False
        with self._lock:
            if key in self._catalogue:  # another process has just written it
                self._pins[key] += 1
                return key, False
            if not self._places.put(in_ram, chunk):
                self._counts["rejected"] += 1
                return None, False
            shorter = self._catalogue.leaf_extended_by(parent, ids)
            replaced = [] if shorter is None or self.is_held(shorter) else [shorter]
            self._drop(replaced)
            self._catalogue.add(described)
            self._counts["admitted"] += 1
            self._pins[key] += 1
        self._places.unlink(replaced)
        return key, True

    def most_valuable(self, limit: int) -> list[dict[str, Any]]:
        """The chunks in memory that would be evicted last, the very last one first."""
        with self._lock:
            infos = self._catalogue.infos()
            return [
                {
                    "key": key,
                    "token_ids": infos[key].token_ids.tolist(),
                    "tokens": infos[key].num_tokens,
                    "bytes": infos[key].nbytes,
                    "tier": self._places.where(key),
                    "lineage": infos[key].lineage.value,
                    "position": infos[key].base_position,
                    "uses": uses,
                    "pinned": key in self._kept,
                }
                for key, uses in self._places.last_to_go(limit)
                if key in infos
            ]

    def pin(self, root: ChunkKey, token_ids: TokenIds) -> int:
        """Keeps what ``token_ids`` begin with from being evicted; returns the number of chunks.
        Pins add up."""
        with self._lock:
            path = self._catalogue.path(root, token_ids)
            self._kept.update(path)
            return len(path)

    def unpin(self, root: ChunkKey, token_ids: TokenIds) -> int:
        """Takes one pin back; returns the number of chunks."""
        with self._lock:
            path = [key for key in self._catalogue.path(root, token_ids) if key in self._kept]
            self._kept.subtract(path)
            self._kept += Counter()  # drops what is not kept any more
            return len(path)

    def forget_text(self, texts: Sequence[TokenIds]) -> int:
        """Forgets every chunk that holds a piece of ``texts`` or was read behind one, in use or
        not, for good and on every tier; returns how many there were. Raises ``ForgetError`` if
        some could not be removed. What requests are computing now is not kept."""
        return self._forget(lambda infos: holding(infos, texts))

    def forget(self, root: ChunkKey) -> int:
        """The same for every chunk of ``root``."""
        return self._forget(lambda infos: [key for key in infos if infos[key].root == root])

    def _forget(self, choose: Callable[[Mapping[ChunkKey, ChunkInfo]], list[ChunkKey]]) -> int:
        """Forgets what ``choose`` takes of what is here, and of what a remote store has."""
        with self._admission:
            self.epoch += 1
            self._places.refresh(now=True)
            with self._lock:
                here = self._catalogue.infos()
            far = {info.key: info for info in self._places.remote_infos()}
            keys = list(dict.fromkeys([*choose(here), *choose(far)]))
            with self._lock:
                self._drop(keys)
            self._places.await_writing()
            left = self._places.purge(keys)
        if left:
            places = " and ".join(f"{count} in {place}" for place, count in left.items())
            raise ForgetError(
                f"of {len(keys)} chunks to be forgotten {places} could not be removed; see that it "
                "can be written and call again"
            )
        return len(keys)

    def clear(self) -> None:
        """Forgets everything that is not in use right now, on every tier of this machine."""
        with self._admission:
            self.epoch += 1
            self._places.refresh(now=True)
            with self._lock:
                keys = [key for key in self._catalogue if key not in self._pins]
                self._drop(keys)
            self._places.await_writing()
            self._places.unlink(keys)

    def flush(self) -> None:
        """Writes what is not written yet."""
        self._places.flush()

    def close(self) -> None:
        """Writes what is not written yet and lets go of everything."""
        with self._admission:
            self._closed = True
            self._places.close()
            with self._lock:
                self._catalogue.clear()

    def stats(self) -> dict[str, Any]:
        remote = self._places.remote_stats()
        with self._lock:
            places = self._places.stats(remote)
            for name in ("rejected", "failed"):
                places[name] += self._counts[name]
            return {
                "chunks": len(self._catalogue),
                "in_use": len(self._pins),
                "pinned": len(self._kept),
                "admitted": self._counts["admitted"],
                **places,
            }

    def check_integrity(self) -> list[str]:
        """What does not add up between catalogue, shelves, tiers and pins; empty when all is
        well."""
        with self._admission, self._places.quiet(), self._lock:
            if self._closed:
                return []
            problems = self._catalogue.check_integrity() + self._places.check_integrity()
            if nowhere := [key for key in self._catalogue if self._places.where(key) is None]:
                problems.append(f"{len(nowhere)} chunks are in the catalogue and in no tier")
            ours = {key for key in self._places.in_memory() if key not in self._catalogue}
            if ours:
                problems.append(f"{len(ours)} chunks are in memory and not in the catalogue")
            if any(count <= 0 for count in self._pins.values()):
                problems.append(f"pins below zero: {dict(self._pins)}")
            return problems

    # What the hierarchy asks and tells, with the lock held.

    def is_held(self, key: ChunkKey) -> bool:
        return key in self._pins or key in self._kept

    def is_wanted(self, key: ChunkKey) -> bool:
        return key in self._catalogue

    def found(self, info: ChunkInfo) -> None:
        if info.origin.fingerprint == self._origin.fingerprint and info.key not in self._catalogue:
            self._catalogue.add(info)

    def described(self, info: ChunkInfo) -> None:
        self._catalogue.describe(info)

    def gone(self, key: ChunkKey) -> None:
        if key in self._catalogue:
            self._catalogue.remove(key)
        self._kept.pop(key, None)

    def _ask_remote(self, root: ChunkKey, token_ids: TokenIds) -> list[ChunkKey]:
        """Enters what a remote store has of the chunks that ``token_ids`` need next; returns
        their keys."""
        if not self._places.asks_remote:
            return []
        unknown: list[ChunkInfo] = []
        parent = root
        with self._lock:
            for start, end in self._cut(token_ids, ()):
                ids = as_token_ids(token_ids[start:end])
                key = chain_key(parent, ids)
                if key not in self._catalogue:
                    exact = Lineage.EXACT
                    unknown.append(
                        ChunkInfo(key, parent, parent, root, ids, start, exact, 16, 0, self._origin)
                    )
                parent = key
        there = self._places.in_remote([info.key for info in unknown])
        found = [info for info, has in zip(unknown, there, strict=False) if has]
        with self._lock:
            found = [info for info in found if info.key not in self._catalogue]
            for info in found:
                self._catalogue.add(info)
            self._places.remember(info.key for info in found)
        return [info.key for info in found]

    # Everything below is called with the lock held.

    def _match(
        self, root: ChunkKey, token_ids: TokenIds, moved_before: int, repair: str
    ) -> KnownRows:
        lost: list[ChunkKey] = []

        def where(key: ChunkKey) -> str | None:
            tier = self._places.where(key)
            if tier is None:
                lost.append(key)
            return tier

        known = self._catalogue.match(root, token_ids, moved_before, repair, where)
        for key in lost:
            self._places.lose(key)
        return known

    def _sibling(self, parent: ChunkKey, ids: TokenIds) -> tuple[ChunkKey | None, int]:
        """A child of ``parent`` that is really there, and how many of ``ids`` it begins with."""
        found = self._catalogue.sibling(parent, ids)
        if found is None:
            return None, 0
        if self._places.where(found[0]) is None:
            self._places.lose(found[0])
            return None, 0
        return found

    def _drop(self, keys: Sequence[ChunkKey]) -> None:
        self._places.drop(keys)
        for key in keys:
            self.gone(key)

    def _unpin(self, keys: Sequence[ChunkKey]) -> None:
        self._pins.subtract(keys)
        for key in set(keys):
            if self._pins[key] <= 0:
                del self._pins[key]
