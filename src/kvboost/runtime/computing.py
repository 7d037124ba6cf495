"""How requests say which rows they need next. If one runs alone, each segment is a forward."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from typing import Any, TypeVar, cast

import torch

from kvboost.model.execution.sampling import Picked
from kvboost.model.execution.segment import Segment
from kvboost.model.triton.host import one_thread
from kvboost.runtime.backend import Backend
from kvboost.runtime.request import RequestState

Result = TypeVar("Result")
Given = torch.Tensor | Picked
"""The logits of some rows, or the next token where rows have a sampler and it ran on the device."""
Results = Given | list[Picked]
"""The same of a segment of several rows that has a sampler: the tokens after each of them."""
Computing = Generator[Segment | None, Results | None, Result]
"""Yields the rows it needs next and receives their logits, or the next token; returns a result.
``None`` instead of rows is a pause: it needs nothing, but text can be shown and other requests can
run."""
Steps = Computing[None]
"""A whole request."""


def await_device(state: RequestState, is_done: Callable[[], bool] | None) -> Computing[None]:
    """Pauses until a device has done something, so that others run meanwhile; None: it has."""
    if is_done is not None and not is_done():
        state.awaits = is_done
        yield None
        state.awaits = None


def next_need(backend: Backend, steps: Computing[Any], given: Results | None) -> Segment | None:
    """Sends ``steps`` the results of their last segment and returns the next one. With a GPU, this
    runs in one thread: there is little to plan and choose between two forwards."""
    with one_thread() if backend.forward.uses_one_thread else nullcontext():
        return steps.send(given)


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
    """Runs a segment and returns its results. A failure is raised in ``steps`` first, so that they
    can clean up."""
    try:
        return backend.forward.run_one(segment)
    except BaseException as error:
        steps.throw(error)
        raise
