from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.tokens.hashing import (
    HASHED_STEP,
    ChunkKey,
    as_token_ids,
    chain_key,
    common_prefix,
    common_steps,
    prefix_hashes,
    root_key,
    window_hashes,
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


def slow_window_hash(space: ChunkKey, tokens: list[int]) -> int:
    """One window, by the definition."""
    base, mix, every_bit = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
    value = sum(token * base**power for power, token in enumerate(tokens)) & every_bit
    value = (value ^ int(space[:16], 16)) * mix & every_bit
    return value ^ (value >> 32)


@given(
    st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 2), max_size=80),
    st.sampled_from([1, 8, 32]),
)
def test_windows_are_hashed_as_if_each_were_alone(tokens: list[int], window: int) -> None:
    space = root_key("model", "")
    starts = range(len(tokens) - window + 1)
    found = window_hashes(space, as_token_ids(tokens), window).tolist()
    assert found == [slow_window_hash(space, tokens[at : at + window]) for at in starts]


def test_long_texts_are_hashed_like_short_ones() -> None:
    space, ids = root_key("model", ""), as_token_ids(range(5000))
    found = window_hashes(space, ids, 32)
    assert len(found) == 5000 - 31
    assert found[4321:4330].tolist() == window_hashes(space, ids[4321:4361], 32).tolist()
