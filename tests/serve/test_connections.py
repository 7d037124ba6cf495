"""Connections over real sockets: idle, slow and many clients do not lock out the others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import h11
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import FakeEngine
from kvboost.serve.connections import FramedConnection
from kvboost.serve.settings import ApiKey
from live_server import LiveServer, connect, live_server, read_until, wait_for

KEYS = (ApiKey("ann", "k-ann"),)
ANN = {"authorization": "Bearer k-ann"}
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


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-half: "])
def test_a_head_must_be_complete_in_time(sent) -> None:
    with live_server(FakeEngine(), head_seconds=0.3) as server, raw(server, sent) as slow:
        wait_for(lambda: is_closed(slow))
        assert status(server, "/health") == 200


def test_sending_a_head_byte_by_byte_does_not_extend_its_time() -> None:
    with live_server(FakeEngine(), head_seconds=0.5) as server, raw(server) as slow:
        drip(slow, 8.0)


def test_a_second_head_must_be_complete_in_time_too() -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with live_server(FakeEngine(), head_seconds=0.5) as server, raw(server, request) as slow:
        read_until(slow, b'"ok"}')
        slow.sendall(request)
        read_until(slow, b'"ok"}')
        slow.sendall(request[:20])
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
    """The parser handles all that has arrived at once, so little may arrive at a time: other
    requests are answered in between."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    body = b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
    with live_server(FakeEngine()) as server, raw(server, head) as sending:
        sending.settimeout(300)
        answer = threading.Thread(target=lambda: read_until(sending, b"not JSON"))
        answer.start()
        sending.sendall(body)
        answered_meanwhile = 0
        with httpx.Client(base_url=server.url) as client:
            while answer.is_alive():
                assert client.get("/health").status_code == 200
                answered_meanwhile += 1
    assert answered_meanwhile > 3


@given(
    st.sampled_from(["GET", "HEAD"]),
    st.sampled_from([b"1.0", b"1.1"]),
    st.booleans(),
    st.lists(st.binary(max_size=40), max_size=6),
)
def test_parts_are_framed_as_h11_does_it(
    method: str, version: bytes, declared: bool, parts: list[bytes]
) -> None:
    """Two responses on one connection, of unknown or of declared length."""
    if method == "HEAD":
        parts = []
    length = sum(map(len, parts))
    headers = [("content-type", "text/plain")]
    headers += [("Content-Length", str(length))] if declared else []

    def sent(connection: h11.Connection) -> list[object]:
        found: list[object] = []
        for _ in range(2):
            connection.receive_data(b"%b / HTTP/%b\r\nhost: x\r\n\r\n" % (method.encode(), version))
            while type(connection.next_event()) is not h11.EndOfMessage:
                pass
            found.append(connection.send(h11.Response(status_code=200, headers=headers)))
            found += [connection.send(h11.Data(data=part)) for part in parts]
            found.append(connection.send(h11.EndOfMessage()))
            found.append(connection.our_state)
            if connection.our_state is not h11.DONE:
                break
            connection.start_next_cycle()
        return found

    assert sent(FramedConnection(h11.SERVER)) == sent(h11.Connection(h11.SERVER))


def test_a_part_after_the_end_is_refused() -> None:
    connection = FramedConnection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[]))
    connection.send(h11.EndOfMessage())
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"more"))
