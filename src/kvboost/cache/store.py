"""The chunk store: lookup with pins, admission under a budget. The only room with locks.

Two locks. ``_lock`` guards the index, the tier and the pins, and is held for microseconds.
``_admission`` lets one request at a time bring chunks in, so that the copies it makes need not
hold up anyone's lookup, and so that identical requests store once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.eviction import LRU, EvictionPolicy
from kvboost.cache.index import PrefixIndex
from kvboost.cache.tiers.base import Tier
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, chain_key

RowCopy = Callable[[int, int], torch.Tensor]
"""``copy(start, end)`` gives rows ``[start, end)`` of a request's KV as a tensor of its own,
``[2, layers, kv_heads, end - start, head_dim]``."""


@dataclass(frozen=True)
class Hit:
    """The first ``num_tokens`` rows of ``chunk`` serve rows from ``start`` of the prompt."""

    chunk: KVChunk
    start: int
    num_tokens: int


class ChunkStore:
    def __init__(
        self,
        tier: Tier,
        *,
        chunk_size: int,
        max_chunks: int | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._tier = tier
        self._chunk_size = chunk_size
        self._max_chunks = max_chunks
        self._policy: EvictionPolicy = policy or LRU()
        self._index = PrefixIndex()
        self._pins: Counter[ChunkKey] = Counter()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._admission = threading.Lock()

    @contextmanager
    def lookup(
        self, root: ChunkKey, token_ids: TokenIds, *, pin: bool = True
    ) -> Iterator[list[Hit]]:
        """The longest known beginning of ``token_ids``, pinned until the context is left.

        ``pin=False`` only looks: nothing becomes younger.
        """
        with self._lock:
            hits = self._match(root, token_ids)
            keys = [hit.chunk.key for hit in hits]
            if pin:
                self._pins.update(keys)
                self._policy.touch(keys)
        try:
            yield hits
        finally:
            if pin:
                with self._lock:
                    self._unpin(keys)

    def admit(self, root: ChunkKey, token_ids: TokenIds, copy: RowCopy, lineage: Lineage) -> int:
        """Keeps the KV of ``token_ids``, which begin a sequence; returns how many chunks are new.

        Chunks that are known are skipped, a shorter one that a new one continues is replaced.
        When the budget is full of pinned chunks, or a copy fails, the rest is left out: the
        beginning of a text is worth more than its end.
        """
        new = 0
        path: list[ChunkKey] = []
        with self._admission:
            try:
                parent = root
                for start, end in fixed(len(token_ids), self._chunk_size):
                    ids = token_ids[start:end]
                    with self._lock:
                        known = self._known(parent, ids)
                        if known is not None:
                            self._pins[known] += 1
                    if known is None:
                        key = chain_key(parent, ids)
                        try:
                            kv = copy(start, end)
                        except (MemoryError, RuntimeError):  # torch is out of memory
                            with self._lock:
                                self._counts["failed"] += 1
                            break
                        # Ids of its own: a view would hold the whole prompt for as long.
                        chunk = KVChunk(key, parent, as_token_ids(ids), kv, start, lineage)
                        with self._lock:
                            if not self._insert(chunk):
                                self._counts["rejected"] += 1
                                break
                            self._pins[key] += 1
                        new += 1
                    parent = known or key
                    path.append(parent)
            finally:
                with self._lock:
                    self._policy.touch(path)
                    self._unpin(path)
        return new

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
        """Forgets every chunk below ``root`` that is not in use right now."""
        with self._admission, self._lock:
            for key in reversed(self._index.descendants(root)):
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
                if chunk.base_position > 0 and chunk.parent not in held
            ]
            if orphans:
                problems.append(f"{len(orphans)} chunks outlived their parents")
            if any(count <= 0 for count in self._pins.values()):
                problems.append(f"pins below zero: {dict(self._pins)}")
            return problems

    # Everything below is called with the lock held.

    def _match(self, root: ChunkKey, token_ids: TokenIds) -> list[Hit]:
        hits: list[Hit] = []
        start = 0
        for match in self._index.match(root, token_ids):
            chunk = self._tier.get(match.key)
            if chunk is None:
                self._lose(match.key)
                break
            hits.append(Hit(chunk, start, match.num_tokens))
            start += match.num_tokens
        return hits

    def _known(self, parent: ChunkKey, ids: TokenIds) -> ChunkKey | None:
        """A child of ``parent`` that begins with ``ids`` and is really there."""
        best = self._index.best_child(parent, ids)
        if best is None or best.num_tokens < len(ids):
            return None
        if not self._tier.contains(best.key):
            self._lose(best.key)
            return None
        return best.key

    def _insert(self, chunk: KVChunk) -> bool:
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
        self._policy.remove(key)
        self._tier.delete(key)

    def _unpin(self, keys: list[ChunkKey]) -> None:
        self._pins.subtract(keys)
        for key in set(keys):
            if self._pins[key] <= 0:
                del self._pins[key]
