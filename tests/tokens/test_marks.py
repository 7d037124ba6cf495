from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, window_hashes
from kvboost.tokens.marks import SHARED, SPAN, WINDOW, _key, marked, marks


def words(num_tokens: int, seed: int = 0, vocab: int = 50_000) -> TokenIds:
    return as_token_ids(np.random.default_rng(seed).integers(0, vocab, num_tokens))


@given(
    seed=st.integers(0, 1 << 30),
    passage=st.integers(SHARED, 200),
    before=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    after=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    vocab=st.sampled_from([2, 50, 50_000]),
)
def test_texts_that_share_a_passage_share_a_mark(seed, passage, before, after, vocab) -> None:
    shared = words(passage, seed, vocab)
    one, other = (
        as_token_ids(
            np.concatenate(
                [
                    words(before[side], seed + 1 + side, vocab),
                    shared,
                    words(after[side], seed + 3 + side, vocab),
                ]
            )
        )
        for side in (0, 1)
    )
    assert set(marks(one).tolist()) & set(marks(other).tolist())


@given(
    tokens=st.lists(st.integers(0, 3), max_size=150),
    secret=st.binary(max_size=100),
    salt=st.binary(max_size=20),
)
def test_the_selection_is_that_of_its_definition(tokens, secret, salt) -> None:
    ids = as_token_ids(tokens)
    starts, found = marked(ids, secret=secret, salt=salt)
    hashes = window_hashes(ChunkKey(_key(secret, salt).hex()), ids, WINDOW).tolist()
    span = min(SPAN, len(hashes))
    expected = {
        start
        for first in range(len(hashes) - span + 1 if span else 0)
        for start in range(first, first + span)
        if hashes[start] == min(hashes[first : first + span])
        and (start == 0 or hashes[start - 1] != hashes[start])
    }
    assert starts.tolist() == sorted(expected)
    by_window: dict[bytes, int] = {}
    for start, mark in zip(starts.tolist(), found.tolist(), strict=True):
        assert by_window.setdefault(ids[start : start + WINDOW].tobytes(), mark) == mark
    assert len(set(by_window.values())) == len(by_window)


def test_a_short_text_has_one_mark_and_a_shorter_one_none() -> None:
    assert len(marks(words(WINDOW - 1))) == 0
    assert len(marks(words(WINDOW))) == 1
    assert len(marks(words(SHARED))) == 1
    starts, found = marked(as_token_ids([]))
    assert (starts.dtype, found.dtype) == (np.int64, np.uint64)
    assert (len(starts), len(found)) == (0, 0)


def test_about_two_of_span_plus_one_windows_are_marks() -> None:
    num_marks = len(marks(words(20_000)))
    assert num_marks == pytest.approx(20_000 * 2 / (SPAN + 1), rel=0.1)


def test_other_secrets_and_salts_have_other_marks() -> None:
    ids = words(500)
    variants = [
        marks(ids),
        marks(ids, secret=b"a"),
        marks(ids, salt=b"a"),
        marks(ids, secret=b"a", salt=b"b"),
        marks(ids, secret=b"ab"),
        marks(ids, secret=b"a" * 200),
    ]
    every = [mark for variant in variants for mark in variant.tolist()]
    assert len(set(every)) == len(every)
    assert np.array_equal(marks(ids, secret=b"a"), marks(ids, secret=b"a"))


def test_marks_stay_the_same_between_versions() -> None:
    """Stored marks must be found by later releases, and on machines of another byte order."""
    ids = as_token_ids(range(64))
    starts, found = marked(ids, secret=b"secret", salt=b"salt")
    assert starts.tolist() == [2, 5, 14, 22, 24]
    assert found.tolist() == [
        2924313058648459602,
        15652359460136087311,
        17758979894613961932,
        10402495141692995413,
        5244724345188201502,
    ]
