"""The states of one request."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.execution.states import (
    CONV,
    RECURRENT,
    RowStates,
    StackedStates,
    StateLost,
    StatePlace,
    StateShape,
)

PLACES = (StatePlace(0, CONV, 0), StatePlace(1, RECURRENT, 0))
SHAPE = StateShape(
    PLACES, ((torch.float32, (1, 2, 3)), (torch.float32, (1, 4))), (torch.device("cpu"),) * 2
)


def run(states: RowStates, start: int, end: int) -> torch.Tensor:
    """What a forward of rows ``[start, end)`` does; returns the columns that a convolution sees."""
    asked, columns = object(), torch.arange(start + 1.0, end + 1).expand(1, 2, -1)
    states.begin(start)
    seen = states.extend_conv(PLACES[0], columns, 3)
    states.set(PLACES[1], torch.full((1, 4), float(end)))
    states.end(end, asked, torch.tensor(float(end)))
    assert states.result_of(asked) == end and states.result_of(object()) is None
    return seen[0, 0]


def test_a_convolution_sees_the_columns_before_its_rows() -> None:
    states = RowStates(SHAPE)
    assert run(states, 0, 1).tolist() == [0, 0, 1]
    assert run(states, 1, 2).tolist() == [0, 0, 1, 2]
    assert run(states, 2, 7).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert states.at(7)[0][0, 0].tolist() == [5, 6, 7]
    assert run(states, 0, 4).tolist() == [1, 2, 3, 4], "a new beginning"


def test_states_are_copied_on_the_grid_and_at_marks() -> None:
    states = RowStates(SHAPE, every=4)
    states.mark(6)
    states.mark(7, lasts=False)
    assert [states.next_mark(row) for row in (0, 4, 6, 7, 8)] == [4, 6, 7, 8, 12]
    run(states, 0, 4)
    run(states, 4, 6)
    run(states, 6, 9)
    assert states.known_rows(9, current=True) == [4, 6, 9]
    assert states.known_rows(9, current=False) == states.known_rows(8, current=True) == [4, 6]
    assert [states.at(row)[1][0, 0].item() for row in (4, 6, 9)] == [4, 6, 9]
    assert states.at(5) is None
    assert [states.lasts(row) for row in (4, 6, 7, 9)] == [True, True, False, False]
    assert states.nbytes == 3 * SHAPE.nbytes == 3 * 40


def test_without_a_grid_nothing_is_copied() -> None:
    states = RowStates(SHAPE)
    states.mark(4)
    run(states, 0, 4)
    run(states, 4, 5)
    assert states.next_mark(0) is None and states.known_rows(5, current=False) == []


def test_a_request_goes_on_from_the_chunk_that_was_placed_last() -> None:
    states = RowStates(SHAPE)
    stored = torch.ones(1, 2, 3), torch.ones(1, 4)
    states.place(3, [])
    states.place(8, stored)
    states.resume()
    assert states.is_at(8) and not states.is_at(3) and states.ends == {3, 8}
    assert run(states, 8, 9).tolist() == [1, 1, 1, 9]
    assert stored[0].eq(1).all() and stored[1].eq(1).all(), "it has copies"
    states.place(3, [])
    states.resume()
    assert not states.is_at(3) and states.is_at(0)
    with pytest.raises(StateLost, match="rows from 3 on"):
        states.begin(3)


def test_states_after_a_forward_that_did_not_end_are_those_of_no_row() -> None:
    states = RowStates(SHAPE)
    run(states, 0, 4)
    states.begin(4)
    assert states.at(4) is None and states.known_rows(4, current=True) == []
    with pytest.raises(StateLost):
        states.begin(4)
    assert run(states, 0, 2).tolist() == [0, 1, 2]


def test_a_row_of_each_of_several_requests() -> None:
    requests = [RowStates(SHAPE, every=4), RowStates(SHAPE)]
    run(requests[0], 0, 3)
    run(requests[1], 0, 6)

    def step() -> StackedStates:
        states = StackedStates(requests)
        assert states.has(1, 0) and not states.has(1, 1)
        columns = states.extend_conv(PLACES[0], torch.full((2, 2, 1), 9.0), 3)
        assert columns[:, 0].tolist() == [[1, 2, 3, 9], [4, 5, 6, 9]]
        held = states.get(PLACES[1])
        assert held is not None and held[:, 0].tolist() == [3, 6]
        assert states.set(PLACES[1], held.add_(1)) is held
        return states

    step()  # and fails after it
    assert [one.at(row)[1][0, 0] for one, row in zip(requests, (3, 6), strict=True)] == [3, 6]
    asked = object(), object()
    step().end((4, 7), asked, torch.tensor([[40.0], [70.0]]))
    assert [one.result_of(it) for one, it in zip(requests, asked, strict=True)] == [40, 70]
    assert [one.at(row)[1][0, 0] for one, row in zip(requests, (4, 7), strict=True)] == [4, 7]
    assert requests[0].known_rows(4, current=False) == [4]
    with pytest.raises(StateLost):
        requests[0].begin(3)
    shared = requests[0].at(4)[1]
    run(requests[1], 7, 9)
    own = requests[1].at(9)
    assert own[0][0, 0].tolist() == [9, 8, 9] and own[1].tolist() == [[9] * 4]
    assert shared.eq(4).all() and own[1].untyped_storage().nbytes() == 16, "no rows of others"
    assert requests[1].nbytes == SHAPE.nbytes
