"""What followed when the end of a text occurred before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvboost.runtime.speculation.suffixes import LONGEST, GrowingText, IndexedText, Tail


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


@given(text=st.lists(st.integers(0, 3), max_size=40), tail=st.lists(st.integers(0, 3), max_size=12))
def test_a_match_is_real_and_about_the_longest(text: list[int], tail: list[int]) -> None:
    match = IndexedText(np.array(text, np.uint32)).find(Tail(tail), 3)
    longest = longest_match(text, tail)
    if match is None:
        assert longest < 2
        return
    assert match.length <= longest and match.follows
    pattern = [*tail[len(tail) - match.length :], *match.follows]
    places = range(len(text) - len(pattern) + 1)
    assert any(text[place : place + len(pattern)] == pattern for place in places)
    # Only the last occurrences of a short n-gram are compared.
    assert match.length >= max(size for size in (2, 4, 8) if size <= longest)


@given(ids=st.lists(st.integers(0, 2), min_size=1, max_size=40), cut=st.integers(1, 40))
def test_a_growing_text_knows_what_it_is_made_of(ids: list[int], cut: int) -> None:
    text = GrowingText(np.array(ids[:cut], np.uint32))
    for token in ids[cut:]:
        text.push(token)
    assert text.ids == ids
    match = text.find(4)
    longest = longest_match(ids, ids)
    assert (match is None) == (longest < 2)
    if match is not None:
        assert 2 <= match.length <= min(longest, LONGEST) and 1 <= len(match.follows) <= 4


def test_what_repeats_itself_goes_on() -> None:
    text = GrowingText(np.array([9], np.uint32))
    for token in [1, 2, 3, 1, 2, 3]:
        text.push(token)
    match = text.find(7)
    assert match is not None and match.follows == [1, 2, 3, 1, 2, 3, 1]


def test_longer_matches_go_first_and_the_answer_before_the_prompt() -> None:
    text = GrowingText(np.array([1, 2, 7, 0, 1, 2, 8], np.uint32))
    for token in [1, 2, 9, 5, 1, 2]:
        text.push(token)
    other = IndexedText([5, 1, 2, 6])
    match = text.find(1)
    assert match is not None and match.follows == [9]
    match = text.find(1, [other])
    assert match is not None and (match.length, match.follows) == (3, [6])
