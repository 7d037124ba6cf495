"""What is remembered of chunks that are gone."""

from __future__ import annotations

import time

from kvboost.cache.departed import REMEMBERED, Departed, gone_rows
from kvboost.tokens.hashing import as_token_ids, chain_key, root_key
from support.chunks import make_chunk

ROOT = root_key("model", "")
IDS = as_token_ids(range(50))


def departed(*lengths: int, how: str = "evicted") -> Departed:
    """The chunks of ``IDS`` of these lengths are gone."""
    found, parent, row = Departed(), ROOT, 0
    for length in lengths:
        ids = IDS[row : row + length]
        key = chain_key(parent, ids)
        found.note(make_chunk(ids, key=key, parent=parent, position=row).info, how)
        parent, row = key, row + length
    return found


def rows(found: Departed, ids=IDS) -> list[tuple[int, int]]:
    left = found.until(time.time())
    return [(one.start, one.end) for one in gone_rows(left, [(ROOT, 0)], ids, b"")]


def test_a_path_of_gone_chunks_is_followed_as_far_as_the_prompt_has_it() -> None:
    found = departed(16, 16, 10)
    assert rows(found) == [(0, 16), (16, 32), (32, 42)]
    assert rows(found, IDS[:40]) == [(0, 16), (16, 32)]
    assert rows(found, as_token_ids([*IDS[:20], 7, *IDS[21:]])) == [(0, 16)]
    assert rows(found, as_token_ids([7, *IDS[1:]])) == []


def test_chunks_that_went_later_do_not_count() -> None:
    found = departed(16)
    assert found.until(time.time() - 60) == []


def test_the_last_ones_are_remembered() -> None:
    found = departed(*[1] * 50)
    for _ in range(REMEMBERED - 20):
        found.note(make_chunk([1], key="k").info, "lost")
    left = found.until(time.time())
    assert len(left) == REMEMBERED
    assert [one.how for one in (left[0], left[-1])] == ["evicted", "lost"]
