"""Streams: how their parts are written, clients that close their connection, and clients that do
not read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.serve.errors import ClientGone
from kvboost.serve.http.streaming import TextEvents, event, unless_gone, within
from support.fake_engine import FakeEngine
from support.live_server import connect, live_server, read_until, wait_for

CHAT = [{"role": "user", "content": "hi"}]


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


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": "hi"}, b'"code":"shutting_down"'),
        ("/v1/responses", {"input": "hi"}, b"event: response.failed"),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 9}, b"event: error"),
    ],
)
def test_a_stopping_server_ends_streams_with_an_error(path, body, said, caplog) -> None:
    fake = FakeEngine(("a", None))
    with ExitStack() as clients:
        with live_server(fake, drain_seconds=1.0) as server:
            content = json.dumps({"model": "fake", "stream": True, **body}).encode()
            client = clients.enter_context(connect(server, content, path=path))
            read_until(client, b"data: ")
        assert not fake.streams[0].is_open
        ending = read_until(client, b"\r\n0\r\n\r\n")
        assert said in ending and b"shutting down" in ending
    assert "without completing" not in caplog.text


def test_a_stopping_server_says_which_document_it_has_not_read() -> None:
    class Slow(FakeEngine):
        async def awarm(self, text: str, header: str | None = None, cache_salt: str = "") -> int:
            await asyncio.sleep(0 if text == "a" else 60)
            return 1

    body = json.dumps({"documents": ["a", "b"]}).encode()
    with ExitStack() as clients:
        with live_server(Slow(), drain_seconds=1.0) as server:
            client = clients.enter_context(connect(server, body, path="/kvboost/warm"))
            read_until(client, b'"done":1')
        ending = read_until(client, b"\r\n0\r\n\r\n")
        assert b'{"done":1,"total":2,"error":{' in ending and b'"shutting_down"' in ending


def parts_of(pieces: Sequence[Any]) -> tuple[list[bytes], str]:
    """The parts that the body of a stream is sent in, and its text."""
    with live_server(FakeEngine(pieces)) as server, connect(server, asked(stream=True)) as client:
        body = read_until(client, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")[2]
    parts = []
    while not body.startswith(b"0\r\n"):
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    events = [line[6:] for line in b"".join(parts).decode().split("\n\n") if line]
    shown = [json.loads(one) for one in events if one != "[DONE]"]
    return parts, "".join(one["choices"][0]["text"] for one in shown if "choices" in one)


def test_pieces_that_arrive_together_are_one_part() -> None:
    parts, text = parts_of([("a", "b", "c", "d", "e")])
    assert text == "abcde"
    assert sum(part.count(b"data: ") for part in parts) == 7  # the last two: an end, and [DONE]
    assert len(parts) <= 2


def test_a_piece_does_not_wait_for_the_next() -> None:
    fake = FakeEngine([("a", "b"), None])
    with live_server(fake) as server, connect(server, asked(stream=True)) as client:
        assert b'"b"' in read_until(client, b'"b"')


def test_a_part_is_of_limited_size() -> None:
    parts, text = parts_of([("x" * 40_000,) * 6])
    assert len(text) == 240_000
    assert max(map(len, parts)) < 110_000 and len(parts) == 4


def test_an_error_comes_after_the_pieces_before_it() -> None:
    parts, text = parts_of([("a", "b"), RuntimeError("secret")])
    assert text == "ab"
    assert b"internal_error" in parts[-1] and b"secret" not in b"".join(parts)
    assert b"[DONE]" not in b"".join(parts)


def test_what_would_end_the_process_ends_one_answer(caplog) -> None:
    fake = FakeEngine([SystemExit(3)])
    with live_server(fake) as server:
        url, body = f"{server.url}/v1/completions", json.loads(asked())
        assert httpx.post(url, json=body, timeout=60).status_code == 500
        fake.pieces = ("Hel", "lo")
        answer = httpx.post(url, json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == "Hello"


def test_a_defect_in_one_answer_leaves_the_others_alone(monkeypatch) -> None:
    fake = FakeEngine(("Hel", "lo"))
    with live_server(fake) as server:
        metrics = server.server.state.metrics
        url, body = f"{server.url}/v1/completions", json.loads(asked())
        with monkeypatch.context() as broken:
            broken.setattr(metrics, "first_token", lambda _: 1 / 0)
            assert httpx.post(url, json=body, timeout=60).status_code == 500
        assert httpx.post(url, json=body, timeout=60).status_code == 200


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_events_of_texts_are_those_of_their_values(text: str) -> None:
    def value(text: str) -> dict[str, Any]:
        return {"id": "né-1", "choices": [{"delta": {"content": text}, "logprobs": None}], "n": 1}

    assert TextEvents(value).event(text) == event(value(text))


def test_events_may_have_numbers_of_numpy() -> None:
    assert event({"a": np.float64(0.5), "b": [np.float64(2.0)]}) == b'data: {"a":0.5,"b":[2.0]}\n\n'
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        event({"a": object()})


class Client:
    """The client of a request whose body has been read."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def _forever(cleaned: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # what is closed may take a moment
        cleaned.append("closed")


def test_the_result_of_work_is_returned_while_the_client_waits() -> None:
    async def main() -> None:
        client = Client()
        assert await unless_gone(client.receive, asyncio.sleep(0, "done")) == "done"
        await asyncio.sleep(0)  # nothing is cancelled afterwards

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await unless_gone(Client().receive, fail())

    asyncio.run(main())


def test_work_for_a_client_that_is_gone_is_cancelled_and_awaited() -> None:
    async def main() -> list[str]:
        client, cleaned = Client(), list[str]()
        asyncio.get_running_loop().call_soon(client.gone.set)
        with pytest.raises(ClientGone):
            await unless_gone(client.receive, _forever(cleaned))
        return cleaned

    assert asyncio.run(main()) == ["closed"]


def test_a_request_that_is_cancelled_is_not_a_client_that_is_gone() -> None:
    async def main() -> list[str]:
        client, cleaned = Client(), list[str]()
        request = asyncio.ensure_future(unless_gone(client.receive, _forever(cleaned)))
        asyncio.get_running_loop().call_soon(request.cancel)
        with pytest.raises(asyncio.CancelledError):
            await request
        return cleaned

    assert asyncio.run(main()) == ["closed"]


def test_work_that_takes_too_long_is_cancelled() -> None:
    async def main() -> list[str]:
        cleaned = list[str]()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.001, _forever(cleaned))
        assert await within(0, asyncio.sleep(0, "no limit")) == "no limit"
        return cleaned

    assert asyncio.run(main()) == ["closed"]
