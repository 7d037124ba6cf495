"""Chunks that are admitted together are those that would be admitted one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.cache import admission
from kvboost.cache.eviction.policy import Entry
from kvboost.cache.quantize import KVData, NewRows
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.gpu import GpuTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import TokenIds, as_token_ids
from support.chunks import ROOT, chunk_store, packing, running_sums
from support.lru import LRU

CHUNK = 4
ROW_BYTES = 2 * 4


class Rows:
    """The rows of a request: each depends on all tokens before it. ``most`` are packed at once;
    more take too much memory."""

    def __init__(self, ids: TokenIds, most: int = 1 << 30) -> None:
        self.kv = running_sums(ids.tolist())
        self.most = most
        self.packed: list[list[tuple[int, int]]] = []

    def __call__(self, parts: Sequence[NewRows]) -> list[KVData]:
        if parts[-1].end - parts[0].start > self.most:
            raise torch.OutOfMemoryError
        self.packed.append([(part.start, part.end) for part in parts])
        return packing(self.kv)(parts)


def make_store(max_rows: int = 1000, gpu_rows: int = 0, policy: type[LRU] = LRU) -> ChunkStore:
    gpu = GpuTier(gpu_rows * ROW_BYTES, torch.device("cpu")) if gpu_rows else None
    tiers = Tiers(RamTier(max_rows * ROW_BYTES), gpu)
    return chunk_store(tiers, CHUNK, window=CHUNK, policy=policy)


def contents(store: ChunkStore) -> dict[str, tuple[object, ...]]:
    """What a store holds, where, and the rows."""
    with store.lock:
        holdings = store.holdings
        found = {}
        for key, info in holdings.catalogue.infos().items():
            chunk = holdings.residency.ready(key)
            assert chunk is not None
            where = holdings.residency.where(key), info.parent, info.lineage
            found[key] = (*where, chunk.data.tensors["kv"][0].flatten().tolist())
        return found


texts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(0, 30)), max_size=8
)


A = [1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0]
"""Some text."""


@settings(deadline=None, max_examples=40)
@given(texts, st.sampled_from([8, 20, 40, 1000]), st.sampled_from([0, 12, 40]))
@example([([*A[:4], *[1] * 11], 16), ([*A, *A[1:8], 1], 6), ([*A, *[0] * 15], 27)], 8, 40)
def test_together_or_one_by_one(texts, max_rows: int, gpu_rows: int) -> None:
    together, one_by_one = (make_store(max_rows, gpu_rows) for _ in range(2))
    for ids, exact_rows in texts:
        tokens = as_token_ids(ids)
        new = []
        for store, most_rows in ((together, 2048), (one_by_one, 1)):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(admission, "MOST_ROWS", most_rows)
                new.append(store.admit(ROOT, tokens, Rows(tokens), exact_rows=exact_rows))
            assert store.stats().in_use == 0
        assert new[0] == new[1]
        assert contents(together) == contents(one_by_one)
    assert together.check_integrity() == []


def test_rows_that_follow_one_another_are_packed_together() -> None:
    store, ids = make_store(), as_token_ids(range(23))
    rows = Rows(ids)
    assert store.admit(ROOT, ids, rows, exact_rows=10) == 7
    # The chunk in which exactness ends comes twice.
    assert rows.packed == [[(0, 4), (4, 8), (8, 10)], [(8, 12), (12, 16), (16, 20), (20, 23)]]
    again = Rows(ids)
    assert store.admit(ROOT, ids, again, exact_rows=10) == 0
    assert again.packed == []


def test_what_is_packed_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_ROWS", 8)
    store, ids = make_store(), as_token_ids(range(18))
    rows = Rows(ids)
    assert store.admit(ROOT, ids, rows, exact_rows=18) == 5
    assert rows.packed == [[(0, 4), (4, 8)], [(8, 12), (12, 16)], [(16, 18)]]


def test_known_chunks_after_a_lost_one_are_not_packed() -> None:
    store, ids = make_store(), as_token_ids(range(16))
    store.admit(ROOT, ids, Rows(ids), exact_rows=16)
    with store.lookup(ROOT, ids) as known:
        lost = known.exact[1].chunk.key
    with store.lock:
        store.holdings.residency.mark_lost(lost)
    rows = Rows(ids)
    assert store.admit(ROOT, ids, rows, exact_rows=16) == 1
    assert rows.packed == [[(4, 8)]]
    with store.lookup(ROOT, ids) as known:
        assert known.exact[-1].end == 16


def test_with_little_memory_fewer_are_copied_at_once() -> None:
    store, ids = make_store(), as_token_ids(range(22))
    rows = Rows(ids, most=8)
    assert store.admit(ROOT, ids, rows, exact_rows=22) == 6
    assert [part for some in rows.packed for part in some] == fixed(22, CHUNK)
    assert store.stats().moves.failed == 0


def test_what_cannot_be_copied_ends_an_admission() -> None:
    store, ids = make_store(), as_token_ids(range(12))

    class Damaged(Rows):
        def __call__(self, parts: Sequence[NewRows]) -> list[KVData]:
            if parts[-1].end > 8:
                raise RuntimeError
            return super().__call__(parts)

    assert store.admit(ROOT, ids, Damaged(ids), exact_rows=12) == 2
    assert (store.stats().moves.failed, store.stats().in_use) == (1, 0)
    assert store.check_integrity() == []


def test_a_full_tier_orders_the_chunks_of_a_request_together() -> None:
    policies: dict[LRU, list[int]] = {}

    class Policy(LRU):
        def add(self, entries: Sequence[Entry]) -> None:
            policies.setdefault(self, []).append(len(entries))
            super().add(entries)

    store = make_store(max_rows=16, gpu_rows=12, policy=Policy)
    for start in (0, 100, 200):
        ids = as_token_ids(range(start, start + 12))
        assert store.admit(ROOT, ids, Rows(ids), exact_rows=12) == 3
    assert store.check_integrity() == []  # the policies have heard of everything
    assert sorted(policies.values()) == [[3, 3], [3, 3, 3]]  # RAM, GPU
