from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import (
    HASHED_STEP,
    as_token_ids,
    chain_key,
    common_prefix,
    common_steps,
    prefix_hashes,
    root_key,
)


def test_every_input_of_a_key_changes_it() -> None:
    roots = [
        root_key("model", "", "exact"),
        root_key("model", "tenant", "exact"),
        root_key("model", "", "approximate"),
        root_key("other", "", "exact"),
        root_key("modelt", "enant", "exact"),
        root_key("", "model", "exact"),
    ]
    first = as_token_ids([1, 2, 3])
    keys = roots + [chain_key(root, first) for root in roots]
    keys += [chain_key(roots[0], as_token_ids([1, 2])), chain_key(keys[-1], first)]
    assert all(left != right for left, right in combinations(keys, 2))
    assert chain_key(roots[0], first) == chain_key(root_key("model", "", "exact"), first)


def test_token_ids_are_copied_and_read_only() -> None:
    source = [1, 2]
    ids = as_token_ids(source)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 5


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, []), (3, [(0, 3)]), (8, [(0, 4), (4, 8)]), (9, [(0, 4), (4, 8), (8, 9)])],
)
def test_fixed_chunks_cover_everything_once(length, expected) -> None:
    assert fixed(length, 4) == expected


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 200), st.integers(0, 3))
def test_prefix_hashes_tell_how_far_two_texts_agree(
    tokens: list[int], place: int, other: int
) -> None:
    changed = [*tokens]
    if place < len(changed):
        changed[place] = other
    left, right = as_token_ids(tokens), as_token_ids(changed)
    steps = common_prefix(left, right) // HASHED_STEP * HASHED_STEP
    assert common_steps(prefix_hashes(left), prefix_hashes(right)) == steps
    assert common_steps(prefix_hashes(left[:place]), prefix_hashes(left)) == (
        min(place, len(left)) // HASHED_STEP * HASHED_STEP
    )
