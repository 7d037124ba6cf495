"""When a request drafts."""

from __future__ import annotations

import pytest

from kvboost.reuse.cost import CostModel
from kvboost.runtime.request import RequestState
from kvboost.runtime.speculation.speculation import Speculation, Speculator
from kvboost.tokens.hashing import ChunkKey
from support.requests import request_of


def speculator(speculate: str | int, *, runs_ahead: bool, others: int) -> Speculator:
    """Of a request whose prompt repeats itself, where a step costs the same for 1 to 64 rows."""
    cost = CostModel(1e-4)
    for rows in range(1, 65):
        for _ in range(8):
            cost.observe_step(rows, 0.01)
    prompt = list(range(2, 40)) * 3
    state = RequestState(request_of(prompt, speculate=speculate), rows=len(prompt))
    state.turn.other_rows = state.turn.other_tokens = others
    found = Speculation(cost).start(state, ChunkKey(""), 0, runs_ahead=runs_ahead)
    assert found is not None
    return found


def drafted(speculate: str | int, *, runs_ahead: bool, others: int) -> int:
    found = speculator(speculate, runs_ahead=runs_ahead, others=others)
    if found.rests():
        return 0
    found.follow()
    return len(found.draft(1, 8, len))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_request_alone_drafts(runs_ahead: bool) -> None:
    assert drafted("auto", runs_ahead=runs_ahead, others=0)


def test_beside_others_steps_that_run_ahead_have_no_drafts_unless_asked_for() -> None:
    assert not drafted("auto", runs_ahead=True, others=3)
    assert drafted("auto", runs_ahead=False, others=3)
    assert drafted(8, runs_ahead=True, others=3)


def test_after_a_rest_it_knows_what_the_answer_has_got_meanwhile() -> None:
    found = speculator("auto", runs_ahead=True, others=3)
    state = found._state
    for token in (2, 3, 4, 5):
        assert found.rests()
        state.token_ids.append(token)
    state.turn.other_rows = state.turn.other_tokens = 0
    assert not found.rests()
    found.follow()
    assert found.draft(1, 3, len) == [6, 7, 8]
