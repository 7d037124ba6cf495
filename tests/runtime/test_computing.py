"""A request that runs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.runtime.computing import text_pieces
from kvboost.runtime.request import RequestState
from support.requests import request_of


def test_a_step_takes_no_time_while_the_caller_has_a_piece() -> None:
    seconds = 0.0

    def take(more: float) -> None:
        nonlocal seconds
        seconds += more

    def run_one(segment: Any) -> None:
        take(3.0)

    def steps() -> Any:
        for piece in "abc":
            take(0.5)
            state.show(piece)
            yield "rows"

    forward = SimpleNamespace(uses_one_thread=False, run_one=run_one)
    device = SimpleNamespace(clock=lambda: seconds)
    backend: Any = SimpleNamespace(device=device, forward=forward)
    state = RequestState(request_of([1, 2]))
    for _ in text_pieces(backend, steps(), state):
        take(100.0)
    assert seconds == pytest.approx(310.5) and state.step_seconds == pytest.approx(3.5)
