"""A request that runs alone: each of its segments is a forward."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, cast

from kvboost.model.segment import Segment
from kvboost.runtime.backend import Backend
from kvboost.runtime.computing import Computing, Result, Results, Steps, next_need
from kvboost.runtime.request import RequestState


def run_alone(backend: Backend, steps: Computing[Result]) -> Result:
    """Runs ``steps`` to the end, each segment in a forward of its own."""
    given = None
    while True:
        try:
            segment = next_need(backend, steps, given)
        except StopIteration as end:
            return cast(Result, end.value)
        given = None if segment is None else _run(backend, steps, segment)


def text_pieces(backend: Backend, steps: Steps, state: RequestState) -> Generator[str, None, None]:
    """Runs one request alone; yields the text that is safe to show. What the caller does between
    two pieces, perhaps in another thread, is no part of a step."""
    shown = 0
    now = backend.device.clock
    with closing(steps):
        given = None
        while True:
            began = now()
            try:
                segment = next_need(backend, steps, given)
            except StopIteration:
                break
            prepared = now() - began
            new, shown = state.text[shown:], len(state.text)
            yield from new
            began = now()
            given = None if segment is None else _run(backend, steps, segment)
            state.step_seconds = prepared + now() - began
    yield from state.text[shown:]


def _run(backend: Backend, steps: Computing[Any], segment: Segment) -> Results:
    """What a segment asks for. The steps see a failure first, so that they can clean up."""
    try:
        return backend.forward.run_one(segment)
    except BaseException as error:
        steps.throw(error)
        raise
