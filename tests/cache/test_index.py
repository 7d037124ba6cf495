from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.chunk import Origin
from kvboost.cache.index import Index
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids
from support.chunks import ORIGIN, ROOT, make_chunk, packing

CHUNK = 4


def cut(ids: TokenIds, boundaries: object) -> list[tuple[int, int]]:
    return fixed(len(ids), CHUNK)


def make_index(naming: bytes = b"") -> Index:
    return Index(cut, ORIGIN, row_bytes=8, naming=naming, window=CHUNK)


def known_rows(index: Index, ids: list[int]) -> int:
    return sum(hit.num_tokens for hit in index.lookup(ROOT, as_token_ids(ids)).exact)


def store(index: Index, ids: list[int]) -> int:
    return len(index.store(ROOT, as_token_ids(ids))[0])


def test_a_longer_chunk_replaces_the_one_that_it_continues() -> None:
    index = make_index()
    first, _ = index.store(ROOT, as_token_ids([1, 2, 3, 4, 5]))
    new, replaced = index.store(ROOT, as_token_ids([1, 2, 3, 4, 5, 6, 7]))
    assert [info.token_ids.tolist() for info in new] == [[5, 6, 7]]
    assert replaced == [first[-1].key] and replaced[0] not in index
    assert len(index) == 2


def test_what_is_removed_is_not_found() -> None:
    index = make_index()
    new, _ = index.store(ROOT, as_token_ids(range(8)))
    index.remove([new[1].key])
    assert known_rows(index, list(range(8))) == 4
    index.remove([new[1].key])  # a second time is nothing
    assert store(index, list(range(8))) == 1
    assert set(index.clear()) == {info.key for info in new} and len(index) == 0


def test_chunks_of_other_models_and_signed_ones_are_left_out() -> None:
    index, chunk = make_index(), make_chunk([1, 2, 3, 4])
    index.add(replace(chunk.info, origin=Origin("another", "")), "disk")
    index.add(replace(chunk.info, signed=True), "disk")
    assert len(index) == 0
    index.add(chunk.info, "disk")
    assert index.tier(chunk.key) == "disk" and known_rows(index, [1, 2, 3, 4]) == 4


def test_a_secret_gives_other_keys_and_signs() -> None:
    plain_new, _ = make_index().store(ROOT, as_token_ids(range(4)))
    index = make_index(b"secret")
    new, _ = index.store(ROOT, as_token_ids(range(4)))
    assert new[0].key != plain_new[0].key and new[0].signed
    assert known_rows(index, list(range(4))) == 4


def test_the_exact_chunks_of_a_text_have_the_same_names_everywhere() -> None:
    ids = as_token_ids(range(10))
    stored, _ = make_index().store(ROOT, ids)
    named = list(make_index().naming.exact_chunks(ROOT, ids))
    assert [info.key for info in named] == [info.key for info in stored]
    assert all(info.is_as_planned(there) for info, there in zip(named, stored, strict=True))


def test_infos_are_those_of_a_root() -> None:
    index, other = make_index(), ChunkKey("00" * 16)
    stored, _ = index.store(ROOT, as_token_ids([1, 2, 3, 4, 5]))
    index.store(other, as_token_ids([1, 2, 3, 4]))
    assert index.infos(ROOT) == {info.key: info for info in stored}
    assert len(index.infos(other)) == 1 and len(index) == 3


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=18)


@settings(deadline=None, max_examples=60)
@given(st.lists(tokens, max_size=6), tokens)
def test_index_and_store_keep_the_same_chunks(texts: list[list[int]], prompt: list[int]) -> None:
    ram = RamTier(1 << 20)
    there = ChunkStore(Tiers(ram), cut=cut, origin=ORIGIN, window=CHUNK)
    index = make_index()

    for ids in map(as_token_ids, texts):
        admitted = there.admit(
            ROOT, ids, packing(torch.zeros(2, 1, 1, len(ids), 1)), exact_rows=len(ids)
        )
        new, _ = index.store(ROOT, ids)
        assert admitted == len(new)
        stored = {chunk.key: chunk.info for chunk in map(ram.get, ram.keys())}
        assert set(stored) == set(index.infos(ROOT))
        for info in new:
            assert stored[info.key].is_as_planned(info) and stored[info.key].nbytes == info.nbytes
    found = index.lookup(ROOT, as_token_ids(prompt), moved_before=99)
    with there.lookup(ROOT, as_token_ids(prompt), moved_before=99, repair="") as known:
        for mine, its in (
            (found.in_place, known.in_place),
            ([h for r in found.moved for h in r.hits], [h for r in known.moved for h in r.hits]),
        ):
            assert [(h.chunk.key, h.start, h.num_tokens, h.offset) for h in mine] == [
                (h.chunk.key, h.start, h.num_tokens, h.offset) for h in its
            ]


# Models with states.


def store_with_states(index: Index, ids: list[int], *ends: int) -> tuple[list[int], list[int]]:
    """The ends of new chunks, and of those that they replace."""
    known = index.infos(ROOT)
    new, replaced = index.store(ROOT, as_token_ids(ids), boundaries=ends)
    return [info.end for info in new], [known[key].end for key in replaced]


def make_resuming_index() -> Index:
    def cut(ids: TokenIds, boundaries: Sequence[int]) -> list[tuple[int, int]]:
        places = [0, *boundaries, len(ids)]
        return [
            (begin + start, begin + end)
            for begin, stop in pairwise(places)
            for start, end in fixed(stop - begin, CHUNK)
        ]

    return Index(cut, ORIGIN, row_bytes=8, window=CHUNK, resumes=True)


def test_text_is_known_up_to_the_last_states() -> None:
    index, ids = make_resuming_index(), list(range(10))
    assert store_with_states(index, ids) == ([4, 8, 10], [])
    assert known_rows(index, [*ids, 1]) == 10
    assert known_rows(index, ids[:9]) == 0
    longer = [*ids, 20, 21, 22]
    assert store_with_states(index, longer, 10) == ([13], [])
    assert known_rows(index, longer[:12]) == 10 and known_rows(index, longer) == 13


def test_a_chunk_without_states_is_replaced_by_one_that_has_some() -> None:
    index, ids = make_resuming_index(), list(range(12))
    store_with_states(index, ids)
    assert store_with_states(index, ids[:8]) == ([8], [8])
    assert known_rows(index, ids[:10]) == 8 and known_rows(index, ids) == 12
    assert store_with_states(index, ids[:8]) == ([], [])


def test_states_are_not_replaced_by_longer_text() -> None:
    index, ids = make_resuming_index(), list(range(4))
    store_with_states(index, ids[:2])
    assert store_with_states(index, ids) == ([4], [])
    assert known_rows(index, ids[:3]) == 2 and known_rows(index, ids) == 4
