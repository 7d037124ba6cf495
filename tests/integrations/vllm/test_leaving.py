from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.integrations.vllm.leaving import Leaving

PAGE, WINDOW = 16, 40


def request(name: str = "a", num_preemptions: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_preemptions=num_preemptions)


@pytest.fixture
def leaving() -> Leaving:
    return Leaving(WINDOW, PAGE)


def freed(rows: int) -> int:
    """The pages that vLLM frees of a windowed layer when so many rows are computed."""
    return max(0, rows - WINDOW + 1) // PAGE


def test_rows_are_due_before_vllm_frees_their_page(leaving: Leaving) -> None:
    leaving.begin(request(), [[1, 2], [3, 4]], 0, 0)
    one = leaving.of(request())
    assert one is not None
    kept_at = []
    for rows in range(1, 200):
        leaving.grow("a", None, rows)
        if leaving.due():
            kept_at.append(rows)
            one.first = rows
        assert one.first >= freed(rows) * PAGE  # no page that is freed has rows to be kept
    assert kept_at[0] == WINDOW + PAGE - 1
    assert len(kept_at) <= 200 // (WINDOW - PAGE)


def test_pages_are_remembered_when_vllm_has_freed_them(leaving: Leaving) -> None:
    leaving.begin(request(), [[1, 2], [3, 4]], 0, 0)
    leaving.grow("a", None, 20)
    leaving.grow("a", [[5], [6]], 32)
    one = leaving.of(request())
    assert one is not None and one.tables == [[1, 2, 5], [3, 4, 6]] and one.rows == 32


@pytest.mark.parametrize(("num_stored", "is_followed"), [(0, False), (16, False), (32, True)])
def test_rows_that_are_nowhere_end_it(leaving: Leaving, num_stored: int, is_followed: bool) -> None:
    leaving.begin(request(), [[1, 2, 3], [0, 0, 4]], 48, num_stored)
    assert (leaving.of(request()) is not None) == is_followed


def test_pages_of_a_preempted_request_are_anothers(leaving: Leaving) -> None:
    leaving.begin(request(), [[1, 2]], 0, 0)
    assert leaving.of(request(num_preemptions=1)) is None
    leaving.begin(request(num_preemptions=1), [[8, 9]], 0, 0)
    one = leaving.of(request(num_preemptions=1))
    assert one is not None and one.tables == [[8, 9]]


def test_an_ended_request_is_not_followed(leaving: Leaving) -> None:
    leaving.begin(request(), [[1, 2]], 0, 0)
    leaving.end("a")
    leaving.grow("a", [[3]], 900)
    assert leaving.of(request()) is None and not leaving.due()
