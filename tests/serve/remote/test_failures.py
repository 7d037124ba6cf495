"""Errors of the engine mean the same to a client, whichever process it speaks to."""

from __future__ import annotations

import inspect
import logging

import pytest

import kvboost.errors
from kvboost.errors import (
    ContextLengthError,
    KVBoostError,
    KVTooLargeError,
    QueueFullError,
    StructuredOutputError,
)
from kvboost.serve.errors import from_engine
from kvboost.serve.remote.wire import engine_lost, from_wire, to_wire

WITH_NUMBERS = {
    ContextLengthError: (9, 5),
    KVTooLargeError: (9, 800, 500),
    QueueFullError: (7, 3, "ann"),
    StructuredOutputError: ("schema", "it is too large"),
}
KINDS = [
    kind
    for _, kind in inspect.getmembers(kvboost.errors, inspect.isclass)
    if issubclass(kind, KVBoostError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_keep_their_class_message_and_numbers(kind) -> None:
    error = kind(*WITH_NUMBERS.get(kind, ("option=3 must be 2",)))
    again = from_wire(to_wire(error))
    assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error)
    here, there = from_engine(error), from_engine(again)
    assert (here.status, here.body(), here.headers) == (there.status, there.body(), there.headers)


def test_a_defect_is_logged_where_it_is_and_without_its_message(caplog) -> None:
    said = " ".join(["secret", "words"])
    try:
        raise ZeroDivisionError(f"the prompt was: {said}")
    except ZeroDivisionError as error:
        with caplog.at_level(logging.ERROR):
            again = from_wire(to_wire(error))
    assert from_engine(again).code == "internal_error"
    assert "ZeroDivisionError" in caplog.text and "test_failures.py" in caplog.text
    assert "secret words" not in caplog.text


def test_a_lost_engine_is_unavailable() -> None:
    assert from_engine(engine_lost()).status == 503
