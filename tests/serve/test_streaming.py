"""Clients that close their connection, and clients that do not read."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack

import pytest

from fake_engine import FakeEngine
from live_server import connect, live_server, read_until, wait_for


def asked(**more: object) -> bytes:
    return json.dumps({"model": "fake", "prompt": "hi", **more}).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [(None,), ("a", None)])
def test_a_closed_connection_cancels_all_its_answers(stream, pieces) -> None:
    """Before the first piece and after it; ``n`` streams each."""
    fake = FakeEngine(pieces)
    with live_server(fake) as server:
        with connect(server, asked(stream=stream, n=3)) as client:
            wait_for(lambda: len(fake.streams) == 3)
            if stream and len(pieces) == 2:
                read_until(client, b"data: ")
            assert all(one.is_open for one in fake.streams)
        wait_for(lambda: not any(one.is_open for one in fake.streams))
        live = server.server.state.live.since(0)
        assert [one["finish_reason"] for one in live] == ["cancelled"] * 3


def test_a_client_that_does_not_read_delays_no_other_and_is_disconnected(caplog) -> None:
    fake = FakeEngine(["x" * 100_000] * 100)
    with live_server(fake, write_seconds=1.5) as server:
        with connect(server, asked(stream=True, max_tokens=90)):
            wait_for(
                lambda: bool(fake.streams) and not fake.streams[0]._pieces
            )  # the answer is complete
            fake.pieces = ("Hel", "lo")
            with connect(server, asked()) as other:
                read_until(other, b'"Hello"')
            wait_for(lambda: not fake.streams[0].is_open)
        live = server.server.state.live.since(0)
        assert [one["finish_reason"] for one in live] == ["stop", "stop"]
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_if_one_of_n_streams_cannot_start_the_others_are_closed() -> None:
    class Full(FakeEngine):
        def astream(self, *args, **options):
            if len(self.streams) == 2:
                raise RuntimeError("no more")
            return super().astream(*args, **options)

    fake = Full((None,))
    with live_server(fake) as server, connect(server, asked(n=3)) as client:
        assert b" 500 " in read_until(client, b"internal_error")
        assert [one.is_open for one in fake.streams] == [False, False]


def test_a_stopping_server_cancels_answers_that_do_not_finish() -> None:
    fake = FakeEngine((None,))
    with ExitStack() as clients:
        with live_server(fake, drain_seconds=1.0) as server:
            client = clients.enter_context(connect(server, asked()))
            wait_for(lambda: bool(fake.streams))
        assert not fake.streams[0].is_open and fake.drained and fake.flushed
        assert b" 503 " in read_until(client, b"shutting down")
