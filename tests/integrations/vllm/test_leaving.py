from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.integrations.vllm.leaving import Leaving, PageEnds

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


# Models with states: group 0 has rows, group 1 has states.


def reading(rows: int = 0, states: int = 0, first: int = 0, **more: Any) -> tuple[PageEnds, Any]:
    """A request for 100 tokens that vLLM has scheduled, ``rows`` of them in pages of 16 rows and
    the states after them in page ``states``."""
    one = SimpleNamespace(
        **{"request_id": "a", "num_preemptions": 0, "num_prompt_tokens": 100, "num_tokens": 100}
        | more
    )
    page_ends = PageEnds((1,), PAGE)
    gone = [0] * (max(rows - 1, 0) // PAGE)
    page_ends.begin(one, [list(range(1, 8)), [*gone, states] if states else []], rows, first)
    return page_ends, one


def test_states_are_kept_in_the_step_that_ends_with_a_page() -> None:
    page_ends, one = reading()
    page_ends.grow("a", [[], [0, 0, 20]], 0)
    assert page_ends.reached(one, 48, 32) == 48
    assert page_ends.reached(one, 48, 64) is None  # too early
    assert page_ends.reached(one, 47, 32) is None  # no page has ended where the step does


def test_states_that_vllm_leaves_within_a_step_are_kept() -> None:
    page_ends, one = reading()
    page_ends.grow("a", [[], [0, 0, 0, 0, 0, 21, 22]], 0)
    assert page_ends.reached(one, 100, 500) == 96  # the last end of a page in the prompt
    page_ends, one = reading(rows=90, states=30)
    page_ends.grow("a", [[], [31]], 90)
    assert page_ends.reached(one, 10, 500) is None  # its page has the states after row 90


def test_states_of_tokens_that_are_not_known_yet_are_kept_in_the_next_step() -> None:
    page_ends, one = reading(rows=111, states=30, num_tokens=111)
    assert page_ends.reached(one, 1, 16) is None
    page_ends.grow("a", [[8], [31]], 112)
    one.num_tokens = 112
    assert page_ends.reached(one, 1, 16) == 112


def test_states_that_a_load_brought_are_not_kept_again() -> None:
    page_ends, one = reading(rows=64, states=30, first=64)
    page_ends.grow("a", [[], [0, 31]], 64)
    assert page_ends.reached(one, 10, 16) is None
    page_ends, one = reading(rows=64, states=30)  # vLLM's own cache had them
    page_ends.grow("a", [[], [0, 31]], 64)
    assert page_ends.reached(one, 10, 16) == 64


def test_states_where_prompts_begin_to_differ_are_kept() -> None:
    page_ends, one = reading(shared_prefix_boundary=32)
    page_ends.grow("a", [[], [0, 20]], 0)
    assert page_ends.reached(one, 32, 500) == 32


def test_states_at_the_end_of_a_prompt_are_kept() -> None:
    page_ends, one = reading(rows=80, states=30, first=80, num_prompt_tokens=96, num_tokens=96)
    page_ends.grow("a", [[], [31]], 80)
    assert page_ends.reached(one, 16, 500) == 96


def test_states_of_a_preempted_request_are_anothers() -> None:
    page_ends, one = reading()
    page_ends.grow("a", [[], [0, 0, 20]], 0)
    one.num_preemptions = 1
    assert page_ends.reached(one, 48, 16) is None
