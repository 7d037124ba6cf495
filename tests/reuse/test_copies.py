"""Which further copies of moved text are mixed with the first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvboost.cache.chunk import Lineage
from kvboost.cache.lookup.hits import Hit, MovedRun
from kvboost.config import MOST_CONTEXTS
from kvboost.reuse.copies import further_copies
from kvboost.reuse.plan import choose
from support.chunks import make_chunk


def run(start: int, end: int, name: int, **given: object) -> MovedRun:
    """A run of one chunk of its own, read from position ``100 * name`` on."""
    lineage = given.get("lineage", Lineage.EXACT)
    ids = range(start, end)
    chunk = make_chunk(ids, position=100 * name, lineage=lineage)  # type: ignore[arg-type]
    tier = str(given.get("tier", "ram"))
    hit = Hit(chunk.info, start, end - start, tier=tier)
    return MovedRun((hit,), float(given.get("resemblance", 0.0)))  # type: ignore[arg-type]


def parts(copies: tuple[tuple[Hit, ...], ...]) -> list[list[tuple[int, int]]]:
    return [[(hit.start, hit.end) for hit in copy] for copy in copies]


def test_every_further_copy_of_a_row_has_its_number() -> None:
    found = [run(0, 100, 1), run(40, 100, 2), run(60, 140, 3)]
    chosen = choose(found)
    assert [(one.start, one.end) for one in chosen] == [(0, 100), (100, 140)]
    copies = further_copies(found, chosen, "ram")
    assert parts(copies) == [[(40, 100)]]  # the third run serves rows of its own already
    more = [*found, run(50, 130, 4)]
    assert parts(further_copies(more, chosen, "ram")) == [[(40, 100), (100, 130)], [(50, 100)]]


def test_copies_that_would_not_help_are_left_out() -> None:
    first = run(0, 100, 1)
    others = [run(0, 100, 2, lineage=Lineage.APPROXIMATE), run(0, 100, 3, tier="disk")]
    assert further_copies([first, *others], (first,), "ram") == ()
    alike = run(0, 100, 1, resemblance=0.9)
    assert further_copies([alike, run(0, 100, 2)], (alike,), "ram") == ()
    assert further_copies([], (), "ram") == ()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(32, 90)), min_size=1, max_size=7))
def test_no_row_comes_twice_in_a_copy_and_none_without_the_copies_before_it(spans) -> None:
    found = [run(start, start + length, name) for name, (start, length) in enumerate(spans, 1)]
    chosen = choose(found)
    held = {row for one in chosen for row in range(one.start, one.end)}
    copies = further_copies(found, chosen, "ram")
    assert len(copies) < MOST_CONTEXTS
    for copy in copies:
        rows = [row for hit in copy for row in range(hit.start, hit.end)]
        assert len(rows) == len(set(rows)) and set(rows) <= held
        held = set(rows)
