"""Arranging documents, where their order is free, so that the exact hit is longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvboost.results import Arrangement
from kvboost.tokens.hashing import TokenIds

_MOST_LOOKUPS = 512
"""After this many lookups the walk ends with the best order found so far."""


def arrange(
    header: TokenIds,
    documents: Sequence[TokenIds],
    question: TokenIds,
    known: Callable[[TokenIds], int],
) -> Arrangement:
    """The order of ``documents`` after ``header`` with the longest exact hit. It walks down the
    prefix tree: documents that are cached whole come first, then one that is cached in part, then
    the rest in the order given. ``known(ids)`` is how many tokens of ``ids`` an exact hit
    covers."""
    lookups = 0
    best: tuple[int, list[int]] = (0, [])

    def walk(ids: TokenIds, order: list[int]) -> None:
        nonlocal lookups, best
        for number in range(len(documents)):
            if number in order or lookups >= _MOST_LOOKUPS:
                continue
            longer = np.concatenate([ids, documents[number]])
            lookups += 1
            reach = known(longer)
            if reach > len(ids) and reach > best[0]:
                best = (reach, [*order, number])
            if reach == len(longer):
                walk(longer, [*order, number])

    as_given = known(np.concatenate([header, *documents]))
    best = (as_given, [])
    walk(header, [])
    order = [*best[1], *(number for number in range(len(documents)) if number not in best[1])]
    prompt = np.concatenate([header, *(documents[number] for number in order), question])
    return Arrangement(
        prompt=prompt.tolist(),
        order=tuple(order),
        exact_tokens=best[0],
        exact_tokens_as_given=as_given,
    )
