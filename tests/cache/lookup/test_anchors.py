from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.lookup import anchors
from kvboost.cache.lookup.anchors import MAX_DONORS, WINDOW, AnchorIndex, Piece, Run
from kvboost.cache.lookup.prefix_tree import PrefixTree
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import (
    ChunkKey,
    TokenIds,
    as_token_ids,
    chain_key,
    hashes_in,
    root_key,
    window_hashes,
)

SPACE = root_key("model", "", "space")
ROOT = root_key("model", "", "exact")
SURE = 2 * WINDOW - 1  # so many tokens of a chunk hold an anchor

# No token occurs twice, so a window never overlaps a copy of itself.
PASSAGES = np.random.default_rng(0).permutation(60_000)[: 6 * 160].reshape(6, 160)
HEADER = 100_000 + np.arange(40)


class OrderedTier:
    """A tree and its anchors, kept in step as the store does it."""

    def __init__(self, chunk_size: int = 128) -> None:
        self.tree = PrefixTree()
        self.anchors = AnchorIndex()
        self.chunk_size = chunk_size

    def store(self, ids: object, space: ChunkKey = SPACE, root: ChunkKey = ROOT) -> list[ChunkKey]:
        token_ids, path = as_token_ids(ids), [root]
        for start, end in fixed(len(token_ids), self.chunk_size):
            tokens = token_ids[start:end]
            best = self.tree.best_child(path[-1], tokens)
            if best is not None and best.num_tokens == len(tokens):
                path.append(best.key)
                continue
            shorter = self.tree.leaf_extended_by(path[-1], tokens)
            if shorter is not None:
                self.remove(shorter)
            key = chain_key(path[-1], tokens)
            self.tree.insert(key, path[-1], tokens)
            self.anchors.insert(space, [(key, tokens)])
            path.append(key)
        return path[1:]

    def remove(self, key: ChunkKey) -> None:
        self.tree.remove(key)
        self.anchors.remove(key)

    def find(self, ids: object, start: int = 0, space: ChunkKey = SPACE) -> list[Run]:
        """What is found, once it is shown to be true, maximal, unique and in order."""
        prompt = as_token_ids(ids)
        runs = self.anchors.find(self.tree, [space], prompt, start)
        for run in runs:
            self.check(run, prompt, start)
        assert len(set(runs)) == len(runs) < 2 * MAX_DONORS * (len(prompt) / WINDOW + 1)
        assert runs == sorted(runs, key=lambda run: run.start)
        return runs

    def check(self, run: Run, prompt: TokenIds, start: int) -> None:
        tree, first, last = self.tree, run.pieces[0], run.pieces[-1]
        assert start <= run.start == first.start
        assert run.end == last.start + last.num_tokens <= len(prompt)
        for piece in run.pieces:
            assert piece.num_tokens > 0
            stored = tree.nodes[piece.key].token_ids[piece.offset : piece.offset + piece.num_tokens]
            assert stored.tolist() == rows_of(piece, prompt).tolist()
        for piece, following in zip(run.pieces, run.pieces[1:], strict=False):
            assert tree.nodes[following.key].parent == piece.key
            assert piece.offset + piece.num_tokens == len(tree.nodes[piece.key].token_ids)
            assert (following.start, following.offset) == (piece.start + piece.num_tokens, 0)
        if run.start > start:
            parent = tree.nodes[first.key].parent
            if first.offset:
                assert tree.nodes[first.key].token_ids[first.offset - 1] != prompt[run.start - 1]
            elif parent in tree:
                assert tree.nodes[parent].token_ids[-1] != prompt[run.start - 1]
        if run.end < len(prompt):
            end = last.offset + last.num_tokens
            if end < len(tree.nodes[last.key].token_ids):
                assert tree.nodes[last.key].token_ids[end] != prompt[run.end]
            else:
                assert tree.best_child(last.key, prompt[run.end :]) is None


def rows_of(piece: Piece, prompt: TokenIds) -> TokenIds:
    return prompt[piece.start : piece.start + piece.num_tokens]


def rows(runs: list[Run]) -> set[int]:
    return {row for run in runs for row in range(run.start, run.end)}


def text(*parts: tuple[int, int, int, int]) -> TokenIds:
    """Parts of passages, each after a header of some tokens."""
    return as_token_ids(
        np.concatenate(
            [np.r_[HEADER[:header], PASSAGES[which, a:b]] for header, which, a, b in parts]
        )
    )


def common_stretches(tokens: TokenIds, prompt: TokenIds) -> Iterator[tuple[int, int, int]]:
    """Slowly: every ``base, begin, end`` where ``SURE`` tokens of a chunk stand in a prompt."""
    lengths = np.zeros(len(prompt) + 1, dtype=int)  # of what agrees before a row
    for offset, token in enumerate(tokens):
        lengths[1:] = np.where(prompt == token, lengths[:-1] + 1, 0)
        for end in np.flatnonzero(lengths >= SURE).tolist():
            yield end - 1 - offset, end - int(lengths[end]), end


parts = st.tuples(
    st.integers(0, 40), st.integers(0, 5), st.integers(0, 100), st.integers(133, 160)
) | st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 30), st.integers(63, 100))
# No more than MAX_DONORS copies of anything: the bounds are tested on their own.
texts = st.lists(parts, min_size=1, max_size=MAX_DONORS // 2)


@given(
    st.lists(texts, min_size=1, max_size=2),
    texts,
    st.sampled_from([32, 45, 64, 100, 128]),
    st.integers(0, 100),
)
def test_everything_that_a_slow_search_finds_is_found(stored, asked, chunk_size, start) -> None:
    shelf = OrderedTier(chunk_size)
    for passages in stored:
        shelf.store(text(*passages))
    prompt = text(*asked)
    found = [piece for run in shelf.find(prompt, start) for piece in run.pieces]
    keys = list(shelf.tree.nodes)
    for key in keys:
        for base, begin, end in common_stretches(shelf.tree.nodes[key].token_ids, prompt[start:]):
            assert any(
                piece.key == key
                and piece.start - piece.offset == start + base
                and piece.start <= start + begin
                and start + end <= piece.start + piece.num_tokens
                for piece in found
            )


@given(st.lists(texts, min_size=1, max_size=3), st.data())
def test_removed_chunks_are_gone_and_the_others_stay(stored, data) -> None:
    shelf = OrderedTier()
    for passages in stored:
        shelf.store(text(*passages))
    assert len(shelf.anchors) == len(shelf.tree)
    while len(shelf.tree):
        assert shelf.anchors.check_integrity() == []
        keys = list(shelf.tree.nodes)
        leaves = [key for key in keys if not shelf.tree.num_children(key)]
        shelf.remove(data.draw(st.sampled_from(leaves)))
        shelf.find(text(*stored[0]))
    assert shelf.anchors.check_integrity() == []
    assert len(shelf.anchors) == 0


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(20, 90)), max_size=5), min_size=2),
    st.sampled_from([32, 40, 64, 100]),
)
def test_runs_found_in_repetitive_text_are_correct(tangles, chunk_size) -> None:
    units = [[0], [0, 1], PASSAGES[0][:50]]
    shelf = OrderedTier(chunk_size)
    *stored, asked = [
        np.concatenate([[], *(np.resize(units[which], length) for which, length in tangle)])
        for tangle in tangles
    ]
    for ids in stored:
        shelf.store(ids)
    shelf.find(asked)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(1, 400), st.integers(1, 99))
def test_text_that_repeats_itself_is_covered_by_few_runs(unit, num_stored, num_before) -> None:
    shelf = OrderedTier()
    shelf.store(np.resize(unit, num_stored))
    prompt = np.r_[np.full(num_before, 7), np.resize(unit, 1000)]
    covered = rows(shelf.find(prompt))
    if num_stored >= SURE:  # copies of less may leave gaps between them
        assert set(range(num_before + WINDOW, len(prompt) - WINDOW)) <= covered


@pytest.mark.parametrize("header", [0, 1, 31, 32, 33, 128, 1000])
def test_a_document_is_found_after_any_header(header) -> None:
    shelf = OrderedTier()
    document = np.concatenate(PASSAGES)
    path = shelf.store(np.r_[HEADER[:17], document])
    prompt = np.r_[200_000 + np.arange(header), document, 300_000 + np.arange(50)]
    (run,) = shelf.find(prompt)
    assert (run.start, run.end) == (header, header + len(document))
    assert [piece.key for piece in run.pieces] == path
    assert run.pieces[0].offset == 17


def test_documents_are_found_in_any_order_and_with_gaps() -> None:
    shelf = OrderedTier()
    for passage in PASSAGES:
        shelf.store(passage)
    prompt = text((3, 5, 0, 160), (0, 2, 0, 70), (9, 2, 75, 160), (1, 0, 0, 160))
    runs = shelf.find(prompt)
    # The second part and the third lie in one chunk; three runs of 160 have a chunk and a tail.
    assert [(run.start, run.end) for run in runs] == [(3, 163), (163, 233), (242, 327), (328, 488)]
    assert [len(run.pieces) for run in runs] == [2, 1, 2, 2]
    assert runs[1].pieces[0].key == runs[2].pieces[0].key


def test_rows_before_the_start_are_left_alone() -> None:
    shelf = OrderedTier()
    shelf.store(PASSAGES[0])
    (run,) = shelf.find(PASSAGES[0], start=50)
    assert (run.start, run.end, run.pieces[0].offset) == (50, 160, 50)
    assert shelf.find(PASSAGES[0], start=160) == []


def test_a_chunk_without_an_anchor_is_reached_from_its_neighbours() -> None:
    shelf = OrderedTier()
    path = shelf.store(PASSAGES[0][:140])  # 128 and 12
    (run,) = shelf.find(np.r_[HEADER, PASSAGES[0]])
    assert run.pieces == (Piece(path[0], 40, 0, 128), Piece(path[1], 168, 0, 12))
    assert shelf.find(PASSAGES[0][120:140]) == []


def test_a_run_reaches_back_into_the_parents() -> None:
    shelf = OrderedTier(chunk_size=40)
    path = shelf.store(PASSAGES[0])
    # 15 tokens of the first chunk, 40 of the second, 32 of the third, then something else.
    (run,) = shelf.find(np.r_[HEADER, PASSAGES[0][25:112], HEADER])
    assert run.pieces == (
        Piece(path[0], 40, 25, 15),
        Piece(path[1], 55, 0, 40),
        Piece(path[2], 95, 0, 32),
    )


def test_a_run_continues_through_the_best_matching_child() -> None:
    shelf = OrderedTier(chunk_size=64)
    common, left, right = PASSAGES[0][:64], PASSAGES[1][:20], PASSAGES[2][:20]
    shelf.store(np.r_[common, left])
    path = shelf.store(np.r_[common, right])
    (run,) = shelf.find(np.r_[HEADER, common, right, HEADER])
    assert [piece.key for piece in run.pieces] == path


def test_the_end_of_a_chunk_is_an_anchor() -> None:
    shelf = OrderedTier(chunk_size=75)
    shelf.store(PASSAGES[0][:75])
    (run,) = shelf.find(np.r_[HEADER, PASSAGES[0][43:75]])
    assert (run.start, run.end) == (40, 72)


def test_spaces_do_not_see_each_other() -> None:
    shelf = OrderedTier()
    other, other_root = root_key("model", "salt", "space"), root_key("model", "salt", "exact")
    shelf.store(PASSAGES[0])
    assert shelf.find(PASSAGES[0], space=other) == []
    path = shelf.store(PASSAGES[0], other, other_root)
    (run,) = shelf.find(PASSAGES[0], space=other)
    assert [piece.key for piece in run.pieces] == path


def test_a_hash_is_not_trusted(monkeypatch) -> None:
    monkeypatch.setattr(anchors, "hashes_in", lambda space, polynomials: np.zeros_like(polynomials))
    shelf = OrderedTier()
    shelf.store(PASSAGES[0][:128])
    assert len(shelf.find(PASSAGES[0][:128])) == 1
    assert shelf.find(PASSAGES[1]) == []
    assert shelf.find(PASSAGES[0], space=root_key("model", "salt", "space")) == []


def test_the_newest_donors_are_used_and_any_can_be_removed() -> None:
    shelf = OrderedTier()
    paths = [shelf.store(np.r_[np.full(128, 70_000 + n), PASSAGES[0]]) for n in range(20)]

    def donors() -> set[ChunkKey]:
        return {run.pieces[0].key for run in shelf.find(np.r_[HEADER, PASSAGES[0]])}

    for newest_gone in range(20):
        left = paths[: 20 - newest_gone]
        assert donors() == {path[1] for path in left[-MAX_DONORS:]}
        for key in reversed(left[-1]):
            shelf.remove(key)
    assert donors() == set()


@pytest.mark.parametrize("num_stored", [32, 100, 128, 1000, 8192])
def test_one_repeated_token_gives_few_runs(num_stored) -> None:
    shelf = OrderedTier()
    shelf.store(np.full(num_stored, 7))
    runs = shelf.find(np.full(8192, 7))
    assert rows(runs) == set(range(8192))
    assert sum(len(run.pieces) for run in runs) < 1000


def test_integrity_names_what_is_wrong() -> None:
    shelf = OrderedTier()
    (key, _) = shelf.store(PASSAGES[0])
    del shelf.anchors._chunks[key]
    shelf.anchors._filter[:] = 0
    assert len(shelf.anchors.check_integrity()) == 2


@given(st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_chunks_are_anchored_alike_together_and_alone(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    chunks = [
        (chain_key(ROOT, ids), ids)
        for ids in (as_token_ids(draw.integers(0, 3, length)) for length in lengths)
    ]
    together, alone = AnchorIndex(), AnchorIndex()
    together.insert(SPACE, chunks)
    for key, ids in chunks:
        alone.insert(SPACE, [(key, ids)])
        for index in (together, alone):
            found = index.windows([key])
            offsets = found.offsets[0, : found.counts[0]]
            hashes = window_hashes(SPACE, ids, WINDOW)
            anchored = hashes_in(SPACE, found.polynomials[0, : found.counts[0]])
            assert np.array_equal(anchored, hashes[offsets])
            assert len(hashes) == 0 or {0, len(hashes) - 1} <= set(offsets.tolist())
    assert together.check_integrity() == alone.check_integrity() == []
