from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvboost.cache.lookup.prefix_tree import PrefixTree
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import as_token_ids, chain_key, root_key

ROOT = root_key("model", "", "exact")
CHUNK = 4
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=12)


def insert_all(index: PrefixTree, ids: list[int]) -> None:
    """As the store does it: known chunks are skipped, a shorter leaf is replaced."""
    parent = ROOT
    for start, end in fixed(len(ids), CHUNK):
        tokens = as_token_ids(ids[start:end])
        best = index.best_child(parent, tokens)
        if best is None or best.num_tokens < len(tokens):
            shorter = index.leaf_extended_by(parent, tokens)
            if shorter is not None:
                index.remove(shorter)
            key = chain_key(parent, tokens)
            index.insert(key, parent, tokens)
        else:
            key = best.key
        parent = key


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@given(sequences, st.lists(st.integers(0, 2), min_size=1, max_size=14))
def test_a_match_is_the_longest_stored_prefix(stored, prompt) -> None:
    index = PrefixTree()
    for ids in stored:
        insert_all(index, ids)
    matched = sum(match.num_tokens for match in index.match(ROOT, as_token_ids(prompt)))
    assert matched == max((common(ids, prompt) for ids in stored), default=0)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), unique_by=tuple, max_size=20),
    st.lists(st.integers(0, 2), max_size=7),
)
def test_whole_children_are_all_prefixes(siblings, prompt) -> None:
    index = PrefixTree()
    for ids in siblings:
        index.insert(chain_key(ROOT, as_token_ids(ids)), ROOT, as_token_ids(ids))
    found = [
        index.nodes[key].token_ids.tolist()
        for key in index.whole_children(ROOT, as_token_ids(prompt))
    ]
    prefixes = [ids for ids in siblings if ids == prompt[: len(ids)]]
    assert found == sorted(prefixes, key=len, reverse=True)


@given(sequences)
def test_no_sibling_is_a_prefix_of_another(stored) -> None:
    index = PrefixTree()
    for ids in stored:
        insert_all(index, ids)
    siblings = defaultdict(list)
    for node in index.nodes.values():
        siblings[node.parent].append(node.order)
    for texts in siblings.values():
        for left, right in pairwise(sorted(texts)):
            assert not right.startswith(left)


@given(sequences, st.data())
def test_removed_chunks_are_gone_and_the_others_stay(stored, data) -> None:
    index = PrefixTree()
    for ids in stored:
        insert_all(index, ids)
    seen = []
    while len(index):
        keys = list(index.nodes)
        key = data.draw(st.sampled_from([key for key in keys if not index.num_children(key)]))
        index.remove(key)
        assert key not in index
        seen.append(key)
    assert all(index.num_children(key) == 0 for key in (ROOT, *seen))


def test_a_match_may_end_inside_a_chunk_and_hashes_are_not_trusted() -> None:
    index = PrefixTree()
    insert_all(index, [1, 2, 3, 4, 5, 6, 7, 8])
    path = index.match(ROOT, as_token_ids([1, 2, 3, 4, 5, 9]))
    assert [match.num_tokens for match in path] == [4, 1]
    assert index.match(ROOT, as_token_ids([9])) == []
    assert index.match(root_key("model", "salt", "exact"), as_token_ids([1, 2])) == []
