from __future__ import annotations

import pytest

from kvboost.cache.lookup.hits import Hit, KnownRows, MovedRun
from support.chunks import make_chunk


def hit(start: int, end: int) -> Hit:
    return Hit(make_chunk(range(200)).info, start, end - start)


def run(start: int, end: int) -> MovedRun:
    return MovedRun((hit(start, end),), 0.0)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (KnownRows(), [(0, 100)]),
        (KnownRows(exact=(hit(0, 100),)), []),
        (KnownRows(exact=(hit(0, 90),)), []),
        (KnownRows(exact=(hit(0, 20),), approximate=(hit(20, 30),)), [(30, 100)]),
        (KnownRows(moved=(run(10, 30), run(20, 25), run(50, 95))), [(0, 10), (30, 50)]),
        (KnownRows(moved=(run(5, 60), run(20, 25), run(90, 180))), [(60, 90)]),
    ],
)
def test_gaps_are_the_rows_that_nothing_covers(
    known: KnownRows, expected: list[tuple[int, int]]
) -> None:
    assert known.gaps(100, 6 if known.moved else 16) == expected
