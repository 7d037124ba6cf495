from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvboost.reuse.arrange import arrange
from kvboost.tokens.hashing import as_token_ids

HEADER, QUESTION = as_token_ids([9, 9]), as_token_ids([7])
DOCUMENTS = [as_token_ids([number] * (number + 2)) for number in range(4)]


def known_among(prompts: list[list[int]]):
    """How much of ids some prompt begins with."""

    def known(ids) -> int:
        return max(
            sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(p, ids)))  # noqa: B905
            for p in [[], *prompts]
        )

    return known


def prompt_of(order) -> list[int]:
    return [*HEADER, *(token for number in order for token in DOCUMENTS[number])]


@given(st.lists(st.permutations(range(4)).map(lambda order: order[:3]), max_size=5), st.data())
def test_no_other_order_has_a_longer_exact_hit(read, data) -> None:
    known = known_among([prompt_of(order) for order in read])
    given_order = data.draw(st.permutations(range(4)))
    documents = [DOCUMENTS[number] for number in given_order]
    found = arrange(HEADER, documents, QUESTION, known)
    assert sorted(found.order) == [0, 1, 2, 3]
    expected = [*HEADER]
    for place in found.order:
        expected += documents[place].tolist()
    assert found.prompt == [*expected, *QUESTION]
    best = max(known(prompt_of(order)) for order in itertools.permutations(range(4)))
    assert found.exact_tokens == known(expected) == best
    assert found.exact_tokens_as_given == known(prompt_of(given_order))
    assert found.saved_tokens >= 0


def test_without_cached_text_the_order_stays_as_given() -> None:
    found = arrange(HEADER, DOCUMENTS, QUESTION, known_among([]))
    assert found.order == (0, 1, 2, 3) and found.exact_tokens == 0
