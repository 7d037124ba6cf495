"""A request that runs alone: each of its segments is a forward."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, cast

from kvboost.model.forward import Forward
from kvboost.model.segment import Segment
from kvboost.runtime.computing import Computing, Result, Results, Steps, next_need
from kvboost.runtime.request import RequestState


def run_alone(forward: Forward, steps: Computing[Result]) -> Result:
    """Runs ``steps`` to the end, each segment in a forward of its own."""
    given = None
    while True:
        try:
            segment = next_need(forward, steps, given)
        except StopIteration as end:
            return cast(Result, end.value)
        given = None if segment is None else _run(forward, steps, segment)


def text_pieces(forward: Forward, steps: Steps, state: RequestState) -> Generator[str, None, None]:
    """Runs one request alone; yields the text that is safe to show."""
    shown = 0
    with closing(steps):
        given = None
        while True:
            try:
                segment = next_need(forward, steps, given)
            except StopIteration:
                break
            new, shown = state.text[shown:], len(state.text)
            yield from new
            given = None if segment is None else _run(forward, steps, segment)
    yield from state.text[shown:]


def _run(forward: Forward, steps: Computing[Any], segment: Segment) -> Results:
    """What a segment asks for. The steps see a failure first, so that they can clean up."""
    try:
        return forward.run_one(segment)
    except BaseException as error:
        steps.throw(error)
        raise
