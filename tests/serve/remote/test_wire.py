"""Messages between two processes arrive whole and in order, however they are cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvboost.results import ReuseReport, Span, SpanKind, Timings, TokenLogprob
from kvboost.serve.remote.wire import (
    Ask,
    Begun,
    Cancel,
    Lost,
    News,
    Pipe,
    Reply,
    Step,
    ToApi,
    ToEngine,
    packed,
)

TIMES = Timings(*map(float, range(12)))


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe[ToEngine], Pipe[ToApi]]]:
    """The engine's end and the API's."""
    left, right = socket.socketpair()
    ends = Pipe[ToEngine](left, ToEngine), Pipe[ToApi](right, ToApi)
    yield ends
    for end in ends:
        end.close()


def test_a_step_arrives_as_it_was(pipes) -> None:
    engine, api = pipes
    spans = (Span(SpanKind.MOVED, 0, 5, "key", 3, 0.5, "ram"), Span(SpanKind.COMPUTE, 5, 9))
    reuse = ReuseReport(spans, ("a note",), "auto", (1, 2), 2.5, 0.1, None)
    logprobs = [TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.5)))]
    step = Step([News(3, [7], logprobs, Begun(reuse, TIMES, None, logprobs)), News(4, [1, 2])])
    engine.send(step)
    api.wait()
    assert api.receive() == [step]


def test_numbers_of_numpy_become_plain_ones(pipes) -> None:
    engine, api = pipes
    engine.send(Reply(1, packed({"rows": np.int64(3), "share": np.float32(0.5), "of": {1}})))
    (reply,) = api.receive()
    assert bytes(reply.value) == bytes(packed({"rows": 3, "share": 0.5, "of": [1]}))


def test_what_the_socket_does_not_take_is_kept_in_order(pipes) -> None:
    engine, api = pipes
    full = []
    api.on_full = lambda: full.append(True)
    large = Ask(1, bytes(5_000_000), 1, "baseline", None, {"seed": 2})
    for message in (large, Cancel(1), Cancel(2)):
        api.send(message)
    assert full == [True]  # asked once, until all is sent
    arrived = []
    while len(arrived) < 3:
        api.flush()
        arrived += engine.receive()
    assert arrived == [large, Cancel(1), Cancel(2)]
    assert api.flush()


def test_a_message_may_arrive_byte_by_byte(pipes) -> None:
    engine, api = pipes
    api.send(Cancel(5))
    sent = engine.socket.recv(100)
    for byte in sent:
        assert engine.receive() == []
        api.socket.send(bytes([byte]))
    assert engine.receive() == [Cancel(5)]


def test_the_end_of_the_other_process_shows_after_its_last_message(pipes) -> None:
    engine, api = pipes
    api.send(Cancel(5))
    api.close()
    assert engine.receive() == [Cancel(5)]
    with pytest.raises(Lost):
        engine.receive()
    engine.send(Step([]))  # there is nobody, and no error: who receives is told
    assert engine.flush()


def test_the_first_message_is_taken_as_it_is(pipes) -> None:
    engine, api = pipes
    engine.send_bytes(b"anything")
    engine.send(Step([]))
    assert api.receive_bytes() == b"anything"
    assert api.receive() == [Step([])]
