"""Connections over real sockets: idle, slow and many clients do not lock out the others."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from kvboost.serve.http.connections import MAX_HEAD
from kvboost.serve.settings import ApiKey, ServerSettings
from support.fake_engine import FakeEngine
from support.live_server import LiveServer, connect, live_app, live_server, read_until, wait_for

KEYS = (ApiKey("ann", "k-ann"),)
ANN = {"authorization": "Bearer k-ann"}
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"model": "fake", "prompt": "hi"}'


@contextmanager
def raw(server: LiveServer, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=120) as connection:
        connection.sendall(sent)
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection; waits for a moment."""
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.settimeout(120)


def status(server: LiveServer, path: str, **headers: str) -> int:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=120).status_code


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_answers_do_not_wait_for_acknowledgements(loop: str) -> None:
    """Without TCP_NODELAY, every answer on a connection that is used again is 40 ms late."""
    with live_server(FakeEngine(), loop=loop) as server, raw(server, HEALTH) as kept:
        read_until(kept, b'"ok"}')
        (connection,) = server.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-half: "])
def test_a_head_must_be_complete_in_time(sent) -> None:
    with live_server(FakeEngine(), head_seconds=0.3) as server, raw(server, sent) as slow:
        wait_for(lambda: is_closed(slow))
        assert status(server, "/health") == 200


def test_sending_a_head_byte_by_byte_does_not_extend_its_time() -> None:
    with live_server(FakeEngine(), head_seconds=0.5) as server, raw(server) as slow:
        drip(slow, 8.0)


def test_a_second_head_must_be_complete_in_time_too() -> None:
    with live_server(FakeEngine(), head_seconds=0.5) as server, raw(server, HEALTH) as slow:
        read_until(slow, b'"ok"}')
        slow.sendall(HEALTH)
        read_until(slow, b'"ok"}')
        slow.sendall(HEALTH[:20])
        wait_for(lambda: is_closed(slow))


def test_a_request_may_take_longer_than_its_head() -> None:
    fake = FakeEngine((None,))
    with (
        live_server(fake, head_seconds=0.2, drain_seconds=0.0) as server,
        connect(server, BODY) as asking,
    ):
        wait_for(lambda: bool(fake.streams))
        time.sleep(0.6)
        assert not is_closed(asking) and fake.streams[0].is_open


def test_a_refused_request_cannot_hold_its_connection_with_a_slow_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    with (
        live_server(FakeEngine(), keys=KEYS, head_seconds=0.5) as server,
        raw(server, head) as slow,
    ):
        read_until(slow, b"invalid_api_key")
        drip(slow, 8.0)


def drip(connection: socket.socket, seconds: float) -> None:
    """Sends byte after byte. The server must close the connection within ``seconds``."""
    began = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < seconds:
            connection.sendall(b"x")
            time.sleep(0.05)


def test_a_new_connection_replaces_the_one_that_has_waited_longest() -> None:
    with live_server(FakeEngine(), max_connections=20) as server, ExitStack() as stack:
        idle = [stack.enter_context(raw(server, b"GET / HT")) for _ in range(60)]
        wait_for(lambda: len(server.server.server_state.connections) == 20)
        assert status(server, "/health") == 200
        wait_for(lambda: sum(map(is_closed, idle)) >= 40)
        assert not is_closed(idle[-1])


def test_a_new_connection_does_not_replace_one_that_has_a_request() -> None:
    fake = FakeEngine((None,))
    with live_server(fake, max_connections=3, drain_seconds=0.0) as server, ExitStack() as stack:
        asking = [stack.enter_context(connect(server, BODY)) for _ in range(3)]
        wait_for(lambda: len(fake.streams) == 3)
        with raw(server) as refused:
            wait_for(lambda: is_closed(refused))
        assert not any(map(is_closed, asking))
        assert all(stream.is_open for stream in fake.streams)


def test_half_sent_requests_without_a_key_do_not_lock_out_others() -> None:
    """530 half-sent bodies used to give everyone 503 for half a minute."""
    limits = {"max_requests": 5, "max_anonymous_requests": 3}
    with live_server(FakeEngine(), keys=KEYS, **limits) as server, ExitStack() as stack:
        for path in ("/health", "/v1/completions", "/nothing", "/metrics"):
            for _ in range(10):
                stack.enter_context(connect(server, b"x", path=path, length=100))
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert status(server, path, **ANN) == 200


def test_requests_without_a_tenant_have_their_own_limit() -> None:
    """The only place for tenants is taken; the page and the metrics have others."""
    fake = FakeEngine((None,))
    limits = {"max_requests": 1, "max_anonymous_requests": 1, "drain_seconds": 0.0}
    with live_server(fake, **limits) as server, connect(server, BODY):
        wait_for(lambda: bool(fake.streams))
        assert status(server, "/v1/models") == 503
        assert status(server, "/metrics") == status(server, "/health") == 200


def test_a_client_that_takes_no_data_is_disconnected() -> None:
    """Whatever it asks for: here the same document again and again."""
    request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
    with live_server(FakeEngine(), write_seconds=0.5) as server, raw(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        flood = threading.Thread(target=send_until_refused, args=(deaf, request * 1000))
        flood.start()
        connections = server.server.server_state.connections
        wait_for(lambda: len(connections) == 1)
        wait_for(lambda: len(connections) == 0)
        flood.join()


def send_until_refused(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


def test_a_body_in_chunks_of_one_byte_does_not_delay_others() -> None:
    """The parser handles all that has arrived at once; other requests are answered in between."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    body = b"1\r\nx\r\n" * 1_000_000 + b"0\r\n\r\n"
    with live_server(FakeEngine()) as server, raw(server, head) as sending:
        flood = threading.Thread(target=sending.sendall, args=(body,))
        answer = threading.Thread(target=lambda: read_until(sending, b"not JSON"))
        answered_meanwhile = 0
        with httpx.Client(base_url=server.url) as client:
            flood.start()
            answer.start()
            while answer.is_alive():
                assert client.get("/health").status_code == 200
                answered_meanwhile += 1
        flood.join()
    assert answered_meanwhile > 3


def test_a_head_without_end_is_refused() -> None:
    head = b"GET /health HTTP/1.1\r\nx-long: " + b"x" * (MAX_HEAD + 1)
    with live_server(FakeEngine()) as server, raw(server, head) as sending:
        assert b"400" in read_until(sending, b"too large")
        wait_for(lambda: is_closed(sending))


def test_a_large_body_of_a_refused_request_is_no_head() -> None:
    """The client sends on, reads its answer, and uses the connection again."""
    body = b"x" * (4 * MAX_HEAD)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    with live_server(FakeEngine(), keys=KEYS) as server, raw(server, head % len(body)) as sending:
        read_until(sending, b"invalid_api_key")
        sending.sendall(body + HEALTH)
        read_until(sending, b'"ok"}')


def test_a_client_that_does_not_wait_gets_one_answer() -> None:
    with live_server(FakeEngine()) as server, raw(server, HEALTH * 50) as hasty:
        answers = b""
        while part := hasty.recv(65536):
            answers += part
    assert answers.count(b"HTTP/1.1 200") == 1


def test_a_second_request_during_an_answer_changes_nothing_of_it() -> None:
    """Also if its body arrives while the first one's answer is streamed."""
    stream = b'{"model": "fake", "prompt": "hi", "stream": true}'
    fake = FakeEngine(("a",) * 3 + (None,))
    with live_server(fake, drain_seconds=0.0) as server, connect(server, stream) as asking:
        read_until(asking, b'"text":"a"')
        asking.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
        )
        assert not is_closed(asking)
        assert len(fake.streams) == 1 and fake.streams[0].is_open


def test_a_client_need_not_wait_for_what_follows_a_complete_answer() -> None:
    """The length says that the answer is complete, although the application has not ended it."""
    ended, told = threading.Event(), []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        told.append(scope["path"])
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    app = Starlette(routes=[Mount("/", answer)])
    app.state.server = SimpleNamespace(
        settings=ServerSettings(), waiting_connections={}, draining=False
    )
    with live_app(app) as server, raw(server, b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n") as kept:
        read_until(kept, b"ok")
        kept.sendall(b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(0.1)
        assert told == ["/1"]
        ended.set()
        read_until(kept, b"ok")
        assert told == ["/1", "/2"]


def test_connections_full_of_requests_do_not_lock_out_others() -> None:
    """800 connections that pipelined /health used to shut new ones out for as long as they
    lasted: each of them always had a request."""
    with live_server(FakeEngine(), max_connections=20) as server, ExitStack() as stack:
        threads = []
        for _ in range(40):
            hasty = stack.enter_context(raw(server))
            flood = threading.Thread(target=send_until_refused, args=(hasty, HEALTH * 20_000))
            flood.start()
            threads.append(flood)
        for _ in range(20):
            assert status(server, "/health") == 200
        for flood in threads:
            flood.join(60)
            assert not flood.is_alive()
