"""Clients that hang up, and clients that do not listen."""

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
def test_who_hangs_up_frees_everything_at_once(stream, pieces) -> None:
    """Before the first piece, and behind it; n streams each."""
    fake = FakeEngine(pieces)
    with live_server(fake) as server:
        with connect(server, asked(stream=stream, n=3)) as client:
            wait_for(lambda: len(fake.streams) == 3)
            if stream and len(pieces) == 2:
                read_until(client, b"data: ")
            assert all(one.is_open for one in fake.streams)
        wait_for(lambda: not any(one.is_open for one in fake.streams), 2.0)
        live = server.server.serving.live.since(0)
        assert [one["finish_reason"] for one in live] == ["cancelled"] * 3


def test_who_does_not_listen_holds_up_nobody_and_is_left_alone(caplog) -> None:
    fake = FakeEngine(["x" * 100_000] * 100)
    with live_server(fake, write_seconds=1.5) as server:
        with connect(server, asked(stream=True, max_tokens=90)):
            wait_for(lambda: bool(fake.streams) and not fake.streams[0]._pieces)  # all is made
            fake.pieces = ("Hel", "lo")
            with connect(server, asked()) as other:
                read_until(other, b'"Hello"')
            wait_for(lambda: not fake.streams[0].is_open)
        live = server.server.serving.live.since(0)
        assert [one["finish_reason"] for one in live] == ["stop", "stop"]
    wrong = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.getMessage() for one in wrong] == [
        "ASGI callable returned without completing response."
    ]


def test_a_failed_engine_call_for_one_of_n_frees_the_others() -> None:
    class Full(FakeEngine):
        def astream(self, *args, **options):
            if len(self.streams) == 2:
                raise RuntimeError("no more")
            return super().astream(*args, **options)

    fake = Full((None,))
    with live_server(fake) as server, connect(server, asked(n=3)) as client:
        assert b" 500 " in read_until(client, b"internal_error")
        assert [one.is_open for one in fake.streams] == [False, False]


def test_stopping_the_server_ends_what_does_not_end() -> None:
    fake = FakeEngine((None,))
    with ExitStack() as clients:
        with live_server(fake, drain_seconds=1.0) as server:
            client = clients.enter_context(connect(server, asked()))
            wait_for(lambda: bool(fake.streams))
        assert not fake.streams[0].is_open and fake.drained and fake.flushed
        assert b" 503 " in read_until(client, b"shutting down")
