"""A request is told of the others of its loop."""

from __future__ import annotations

from kvboost.runtime.request import RequestState
from kvboost.runtime.scheduler import Company, Job
from kvboost.tokens.hashing import ChunkKey
from support.requests import NoListener, request_of


def job(answered: int, need: int | None, expected: float = 1.0, promised: float = 0.0) -> Job:
    state = RequestState(request_of([1, 2, 3]), token_ids=[7] * answered)
    state.expected_tokens, state.promised_tokens = expected, promised
    found = Job(state, ChunkKey("root"), NoListener())
    found.need = None if need is None else range(need)  # type: ignore[assignment]
    return found


def test_a_request_is_told_what_the_others_need_and_expect() -> None:
    reading, one, other = job(0, 30), job(2, 1, 1.0, 0.5), job(3, 4, 2.5, 1.0)
    company = Company([reading, one, other])
    assert company.num_answering == 2
    company.take(one)
    turn = one.state.turn
    assert (turn.other_tokens, turn.other_promises, turn.other_rows) == (2.5, 1.0, 34)
    one.state.expected_tokens, one.need = 3.0, range(3)  # type: ignore[assignment]
    company.add(one)
    company.take(other)
    assert (other.state.turn.other_tokens, other.state.turn.other_rows) == (3.0, 33)


def test_one_that_has_ended_is_not_counted() -> None:
    ended, paused = job(2, 1), job(1, None)
    company = Company([ended, paused])
    company.take(ended)
    company.take(paused)
    assert company.num_answering == 0
    assert (paused.state.turn.other_tokens, paused.state.turn.other_rows) == (0.0, 0)


def test_rows_of_prompts_do_not_count_where_they_have_forwards_of_their_own() -> None:
    reading, one, other = job(0, 300), job(2, 1), job(3, 4)
    company = Company([reading, one, other], shares_forwards=False)
    company.take(one)
    assert one.state.turn.other_rows == 4
    company.add(one)
    company.take(reading)
    reading.state.token_ids.append(7)  # it answers now
    reading.need = range(1)  # type: ignore[assignment]
    company.add(reading)
    company.take(one)
    assert one.state.turn.other_rows == 5
