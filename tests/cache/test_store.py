from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.admission import Pack
from kvboost.cache.quantize import KVData
from kvboost.cache.store import ChunkLost, ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.stats import TierStats
from kvboost.tokens.hashing import as_token_ids, root_key
from support.chunks import ORIGIN, ROOT, chunk_store, packing, running_sums

CHUNK = 4
ROW_BYTES = 2 * 4  # keys and values, one float each


def rows_of(ids: list[int]) -> Pack:
    return packing(running_sums(ids))


def make_store(max_rows: int = 1000) -> ChunkStore:
    tiers = Tiers(RamTier(max_rows * ROW_BYTES))
    return chunk_store(tiers, CHUNK, window=CHUNK)


def ram(store: ChunkStore) -> TierStats:
    return store.stats().tiers["ram"]


def admit(store: ChunkStore, ids: list[int]) -> int:
    return store.admit(ROOT, as_token_ids(ids), rows_of(ids), exact_rows=len(ids))


def check_hit(store: ChunkStore, ids: list[int]) -> int:
    """How many leading rows are known; each must be what was stored."""
    expected = running_sums(ids)
    with store.lookup(ROOT, as_token_ids(ids)) as known:
        for hit, data in store.fetch(known.exact):
            kv = data.tensors["kv"][:, :, :, : hit.num_tokens]
            assert torch.equal(kv, expected[:, :, :, hit.start : hit.end])
            assert hit.chunk.base_position == hit.start and hit.distance == hit.offset == 0
        store.touch(known.exact)
        return sum(hit.num_tokens for hit in known.exact)


def test_an_admitted_text_is_found_and_stored_once() -> None:
    store = make_store()
    assert admit(store, list(range(10))) == 3
    assert admit(store, list(range(10))) == 0
    assert check_hit(store, list(range(10))) == 10
    assert check_hit(store, [0, 1, 2, 3, 4, 9, 9]) == 5
    assert check_hit(store, [5]) == 0
    assert ram(store).nbytes == 10 * ROW_BYTES


def test_the_last_chunk_of_a_text_that_grows_is_left_out() -> None:
    store = make_store()
    for length, new in ((10, 2), (8, 0), (13, 1), (3, 0)):
        ids = list(range(length))
        known = as_token_ids(ids)
        kept = store.admit(ROOT, known, rows_of(ids), exact_rows=length, grows=True)
        assert kept == new
    assert check_hit(store, list(range(13))) == 12
    assert admit(store, list(range(13))) == 1


def test_a_chunk_holds_its_own_ids_and_not_the_prompt() -> None:
    store = make_store()
    admit(store, list(range(10)))
    with store.lookup(ROOT, as_token_ids(range(10))) as known:
        assert all(hit.chunk.token_ids.base is None for hit in known.exact)


def test_a_longer_chunk_replaces_the_tail_that_it_continues() -> None:
    store = make_store()
    admit(store, [1, 2, 3, 4, 5])
    assert admit(store, [1, 2, 3, 4, 5, 6, 7]) == 1
    assert store.stats().chunks == 2
    assert admit(store, [1, 2, 3, 4, 5, 6]) == 0  # a part of what is known
    assert check_hit(store, [1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_the_beginning_of_a_text_that_does_not_fit_is_kept() -> None:
    store = make_store(max_rows=8)
    assert admit(store, list(range(20))) == 2
    assert check_hit(store, list(range(20))) == 8
    assert store.stats().moves.rejected == 1
    assert (
        make_store(max_rows=3).admit(ROOT, as_token_ids([1] * 4), rows_of([1] * 4), exact_rows=4)
        == 0
    )


def test_the_least_recently_used_leaf_is_evicted() -> None:
    store = make_store(max_rows=12)
    admit(store, [1, 1, 1, 1, 2, 2, 2, 2])
    admit(store, [3, 3, 3, 3])
    check_hit(store, [1, 1, 1, 1, 2, 2, 2, 2])
    admit(store, [4, 4, 4, 4])
    assert check_hit(store, [3, 3, 3, 3]) == 0
    assert check_hit(store, [1, 1, 1, 1, 2, 2, 2, 2]) == 8


def test_pinned_chunks_stay() -> None:
    store = make_store(max_rows=4)
    admit(store, [1, 1, 1, 1])
    with store.lookup(ROOT, as_token_ids([1, 1, 1, 1])) as known:
        assert admit(store, [2, 2, 2, 2]) == 0
        assert store.stats().in_use == 1
        store.clear()
        assert len(known.exact) == 1 and store.stats().chunks == 1
    assert store.stats().in_use == 0
    assert admit(store, [2, 2, 2, 2]) == 1
    assert check_hit(store, [1, 1, 1, 1]) == 0


def test_pins_are_released_when_the_request_fails() -> None:
    store = make_store()
    admit(store, [1, 1, 1, 1])
    with pytest.raises(RuntimeError), store.lookup(ROOT, as_token_ids([1, 1, 1, 1])):
        raise RuntimeError
    assert store.stats().in_use == 0


def test_a_failed_copy_stores_nothing() -> None:
    store = make_store()

    def broken(*_: object) -> KVData:
        raise RuntimeError("out of memory")

    assert store.admit(ROOT, as_token_ids([1, 2, 3, 4]), broken, exact_rows=4) == 0
    assert (store.stats().in_use, store.stats().moves.failed) == (0, 1)
    assert admit(store, [1, 2, 3, 4]) == 1


def test_a_lookup_without_pins_is_not_a_use() -> None:
    store = make_store(max_rows=8)
    admit(store, [1, 1, 1, 1])
    admit(store, [2, 2, 2, 2])
    with store.lookup(ROOT, as_token_ids([1, 1, 1, 1]), pin=False) as known:
        assert len(known.exact) == 1 and store.stats().in_use == 0
    admit(store, [3, 3, 3, 3])
    assert check_hit(store, [1, 1, 1, 1]) == 0


def test_a_rejected_chunk_does_not_replace_the_shorter_one_it_continues() -> None:
    store = make_store(max_rows=3)
    admit(store, [1, 2])
    with store.lookup(ROOT, as_token_ids([1, 2])):
        assert admit(store, [1, 2, 3, 4]) == 0
    assert check_hit(store, [1, 2]) == 2


def test_a_lost_chunk_and_all_chunks_after_it_are_misses() -> None:
    tier = RamTier(10_000)
    store = chunk_store(Tiers(tier), CHUNK)
    ids = list(range(12))
    admit(store, ids)
    with store.lookup(ROOT, as_token_ids(ids)) as known:
        tier.delete(known.exact[1].chunk.key)
        with pytest.raises(ChunkLost):
            list(store.fetch(known.exact))
    assert check_hit(store, ids) == 4
    assert (store.stats().moves.lost, store.stats().in_use) == (1, 0)
    assert store.check_integrity() == []
    assert admit(store, ids) == 1  # the chunks after it were never lost
    assert check_hit(store, ids) == 12


def test_forgetting_one_root_leaves_the_others() -> None:
    store = make_store()
    other = root_key("model", "salt")
    admit(store, [1, 2, 3, 4, 5])
    store.admit(other, as_token_ids([1, 2, 3]), rows_of([1, 2, 3]), exact_rows=3)
    store.forget(ROOT)
    assert check_hit(store, [1, 2, 3]) == 0
    assert store.stats().chunks == 1
    store.close()
    assert store.stats().chunks == 0


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=20)


@settings(max_examples=30)
@given(texts, texts, st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(0, 20))
def test_an_early_lookup_finds_as_much_as_a_late_one(before, meanwhile, ids, exact_rows) -> None:
    """Whatever is admitted and evicted between the two, exact or from ``exact_rows`` on not."""
    store = make_store(max_rows=32)
    for text in before:
        admit(store, text)
    wanted, end = as_token_ids(ids), len(ids)
    early = store.look_early(ROOT, wanted, moved_before=end, repair="x")
    for text in meanwhile:
        tokens, exact = as_token_ids(text), min(exact_rows, len(text))
        store.admit(ROOT, tokens, rows_of(text), exact_rows=exact, repair="x")
    with store.lookup(ROOT, wanted, moved_before=end, repair="x") as late:
        pass
    with store.lookup(ROOT, wanted, moved_before=end, repair="x", early=early) as known:
        assert [hit.end for hit in known.exact[-1:]] == [hit.end for hit in late.exact[-1:]]
        assert known.gaps(end, CHUNK) == late.gaps(end, CHUNK)
        assert [hit.end for hit in known.in_place[-1:]] == [hit.end for hit in late.in_place[-1:]]
        for hit, _ in store.fetch(list(known.hits())):
            stored = hit.chunk.token_ids[hit.offset : hit.offset + hit.num_tokens]
            assert stored.tolist() == ids[hit.start : hit.end]


def test_an_early_lookup_holds_until_something_better_comes_or_a_chunk_goes() -> None:
    def find_early() -> tuple[ChunkStore, Callable[[], bool]]:
        store = make_store(max_rows=16)
        admit(store, [9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8])
        prompt = as_token_ids([1, 2, 3, 4, 5, 6, 7, 8])
        early = store.look_early(ROOT, prompt, moved_before=8)
        assert early is not None and not early.known.exact and len(early.known.moved) == 1

        def holds() -> bool:
            with store.lookup(ROOT, prompt, moved_before=8, early=early) as known:
                return known is early.known

        return store, holds

    store, holds = find_early()
    assert holds()
    admit(store, [0, 0, 0, 0])
    assert holds()
    admit(store, [1, 2, 0, 0])  # begins as the prompt does
    assert not holds()

    store, holds = find_early()
    for number in range(10, 14):
        admit(store, [number] * 4)
    assert not holds()

    store, holds = find_early()
    store.forget(ROOT)
    assert not holds()


def test_an_early_lookup_does_not_hide_a_repaired_text_that_came_since() -> None:
    """It has in place what was found elsewhere, so nothing must be moved and repaired again."""
    store = make_store()
    admit(store, [9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8])
    prompt, others = as_token_ids([1, 2, 3, 4, 5, 6, 7, 8, 0]), [1, 2, 3, 4, 5, 6, 7, 8, 3]
    early = store.look_early(ROOT, prompt, moved_before=8, repair="x")
    store.admit(ROOT, as_token_ids(others), rows_of(others), exact_rows=0, repair="x")
    with store.lookup(ROOT, prompt, moved_before=8, repair="x", early=early) as known:
        assert [(hit.start, hit.end) for hit in known.approximate] == [(0, 4), (4, 8)]
        assert not known.moved


def test_identical_concurrent_admissions_store_once() -> None:
    store = make_store()
    ids = list(range(40))
    barrier = threading.Barrier(4)

    def work(_: int) -> int:
        barrier.wait()
        return admit(store, ids)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(work, range(4))) == [0, 0, 0, 10]


def test_an_approximate_branch_continues_only_whole_chunks() -> None:
    """A branch that follows a chunk of four tokens does not serve after three of them."""
    store = make_store()
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    store.admit(ROOT, as_token_ids(ids), rows_of(ids), exact_rows=4, repair="x")
    with store.lookup(ROOT, as_token_ids(ids), moved_before=8, repair="x") as known:
        assert [hit.end for hit in known.exact] == [4]
        assert [(hit.start, hit.end) for hit in known.approximate] == [(4, 8)]
    shorter = as_token_ids([1, 2, 3, 5, 6, 7, 8])
    with store.lookup(ROOT, shorter, moved_before=7, repair="x") as known:
        assert [hit.end for hit in known.exact] == [3] and known.approximate == ()
    with store.lookup(ROOT, as_token_ids(ids), moved_before=8, repair="y") as known:
        assert known.approximate == ()
    assert store.check_integrity() == []


def test_approximate_copies_go_once_the_text_is_known_exactly() -> None:
    store, ids = make_store(), list(range(12))
    tokens, other = as_token_ids(ids), as_token_ids([*ids[:8], 90, 91, 92, 93])

    def drop() -> int:
        return store.drop_superseded(ROOT, tokens, "x")

    def approximate(asked=tokens) -> int:
        with store.lookup(ROOT, asked, moved_before=99, repair="x", pin=False) as known:
            return sum(hit.num_tokens for hit in known.approximate)

    def admit_approximately(asked) -> None:
        store.admit(ROOT, asked, rows_of(asked.tolist()), exact_rows=6, repair="x")

    admit_approximately(tokens)
    assert drop() == 0 and approximate() == 6  # nothing exact has taken their place
    store.admit(ROOT, tokens[:8], rows_of(ids[:8]), exact_rows=8)
    assert drop() == 0 and approximate() == 4  # the second chunk goes on where the exact ones end
    admit_approximately(other)
    admit(store, ids)
    with store.lookup(ROOT, tokens, moved_before=99, repair="x") as known:
        assert known.approximate == ()
    assert drop() == 1 and approximate(other) == 4  # the other text still needs the first chunk
    assert store.drop_superseded(ROOT, other, "x") == 0
    admit(store, other.tolist())
    assert store.drop_superseded(ROOT, other, "y") == 0  # another repair's
    assert store.drop_superseded(ROOT, other, "x") == 2
    assert check_hit(store, ids) == check_hit(store, other.tolist()) == 12
    assert store.check_integrity() == []


def test_approximate_copies_in_use_stay() -> None:
    store, ids = make_store(), list(range(12))
    tokens = as_token_ids(ids)
    store.admit(ROOT, tokens, rows_of(ids), exact_rows=6, repair="x")
    with store.lookup(ROOT, tokens, moved_before=99, repair="x") as known:
        assert len(known.approximate) == 2
        admit(store, ids)
        assert store.drop_superseded(ROOT, tokens, "x") == 0
    assert store.drop_superseded(ROOT, tokens, "x") == 2


def test_exactness_may_end_inside_a_chunk() -> None:
    store = make_store()
    ids = list(range(10, 22))
    assert store.admit(ROOT, as_token_ids(ids), rows_of(ids), exact_rows=6) == 4
    assert check_hit(store, ids) == 6
    with store.lookup(ROOT, as_token_ids(ids), moved_before=12) as known:
        assert [(hit.start, hit.end) for hit in known.approximate] == [(6, 8), (8, 12)]
        assert known.approximate[0].offset == 2 and known.approximate[0].distance == 0
    assert store.stats().in_use == 0 and store.check_integrity() == []
    store.forget(ROOT)
    assert store.stats().chunks == 0


def test_only_moved_runs_that_are_used_count_as_used() -> None:
    texts = [list(range(start, start + 8)) for start in (100, 200, 300)]
    for served in (False, True):
        store = make_store(max_rows=24)
        for ids in texts:
            admit(store, ids)
        # The oldest text is found at another place; a new one then needs its room.
        prompt = as_token_ids([1, *texts[0]])
        with store.lookup(ROOT, prompt, moved_before=9) as known:
            assert known.exact == () and len(known.moved) == 1
            if served:
                store.touch(*(run.hits for run in known.moved))
        admit(store, list(range(400, 408)))
        assert check_hit(store, texts[0]) == (8 if served else 0)
        assert check_hit(store, texts[1]) == (0 if served else 8)


def test_a_chunk_never_follows_one_that_ends_elsewhere() -> None:
    """A longer chunk that begins alike must not become the parent of what follows a shorter."""
    ids = [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    for boundaries in ((), (2,), (3, 5)):
        store = ChunkStore(
            Tiers(RamTier(10_000)),
            cut=lambda ids, ends: [
                part
                for part in zip([0, *ends], [*ends, len(ids)], strict=True)
                if part[0] < part[1]
            ],
            origin=ORIGIN,
        )
        admit(store, ids)  # one chunk
        tokens = as_token_ids(ids)
        store.admit(ROOT, tokens, rows_of(ids), exact_rows=10, boundaries=boundaries)
        assert store.check_integrity() == []
        for prompt in (ids, [*ids, *ids[2:]], [*ids[:2], *ids[2:5], 9]):
            check_hit(store, prompt)
