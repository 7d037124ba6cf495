"""What followed when the end of a text occurred before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.runtime.speculation.suffixes import LONGEST, GrowingText, IndexedText, Match, Tail


def longest_match(text: list[int], tail: list[int]) -> int:
    """The slow reference: the longest end of ``tail`` in ``text`` that a token follows."""
    ends = range(1, len(text))
    lengths = (
        next(
            (n for n in range(min(end, len(tail))) if text[end - 1 - n] != tail[-1 - n]),
            min(end, len(tail)),
        )
        for end in ends
    )
    return max(lengths, default=0)


@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    tail=st.lists(st.integers(0, 3), max_size=12),
    longer_than=st.integers(0, 9),
)
def test_an_occurrence_is_real_and_about_the_longest(
    text: list[int], tail: list[int], longer_than: int
) -> None:
    indexed = IndexedText(np.array(text, np.uint32))
    found = indexed.find(Tail(tail))
    longest = longest_match(text, tail)
    if found is None:
        assert longest < 2
    else:
        assert found.length <= longest and found.end < len(text)
        assert text[found.end - found.length : found.end] == tail[len(tail) - found.length :]
        # Only the last occurrences of a short n-gram are compared.
        assert found.length >= max(size for size in (2, 4, 8) if size <= longest)
    is_longer = found is not None and found.length > longer_than
    assert (indexed.find(Tail(tail), longer_than) is not None) == is_longer


@given(ids=st.lists(st.integers(0, 2), min_size=1, max_size=40), cut=st.integers(1, 40))
def test_a_growing_text_knows_what_it_is_made_of(ids: list[int], cut: int) -> None:
    prompt, other = np.array(ids[:cut], np.uint32), IndexedText([0, 1, 2, 0, 0, 1, 1, 2, 2, 1, 0])
    text, beside, followed = (GrowingText(prompt, others) for others in ([], [other], [other]))
    for token in ids[cut:]:
        followed.find(4)  # each time, so that it follows what it has found
        for growing in (text, beside, followed):
            growing.push(token)
    assert text.ids == ids
    match = text.find(4)
    longest = longest_match(ids, ids)
    assert (match is None) == (longest < 2)
    if match is not None:
        assert 2 <= match.length <= min(longest, LONGEST) and 1 <= len(match.follows) <= 4
    match, same = beside.find(4), followed.find(4)
    assert (match is None) == (same is None)
    if same is not None:
        assert 2 <= same.length <= max(longest, longest_match(other.ids.tolist(), ids))


def test_what_repeats_itself_goes_on() -> None:
    text = GrowingText(np.array([9], np.uint32))
    for token in [1, 2, 3, 1, 2, 3]:
        text.push(token)
    match = text.find(7)
    assert match is not None and match.follows == [1, 2, 3, 1, 2, 3, 1]


def test_longer_matches_go_first_and_the_answer_before_the_prompt() -> None:
    prompt, other = np.array([1, 2, 7, 0, 1, 2, 8], np.uint32), IndexedText([5, 1, 2, 6])
    alone, beside = GrowingText(prompt), GrowingText(prompt, [other])
    for token in [1, 2, 9, 5, 1, 2]:
        alone.push(token)
        beside.push(token)
    assert alone.find(1) == Match(2, [9])
    assert beside.find(1) == Match(3, [6])


def test_what_was_found_is_not_looked_up_again_while_it_goes_on() -> None:
    other = IndexedText([7, 1, 2, 3, 9])
    text = GrowingText(np.array([1, 2, 3, 4, 5, 6], np.uint32), [other])
    for token in [7, 1]:
        text.push(token)
    assert text.find(9) == Match(2, [2, 3, 9])
    other.find = None  # type: ignore[method-assign,assignment]
    text.push(2)
    assert text.find(9) == Match(3, [3, 9])
    with pytest.raises(TypeError):  # what followed there has not followed here
        text.push(8)
        text.find(9)
