"""Connections to upstreams: kept, without delay, and never with another request's answer."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import httpx
import pytest
import trustme
import uvloop

from kvboost.deploy.connections import Connections, read_up_to
from kvboost.serve.app import create_app
from kvboost.serve.settings import ServerSettings
from support.fake_engine import FakeEngine
from support.live_server import live_app, live_router
from support.routed import ask
from support.scripted_upstream import hang, hang_up, say, stream, upstream, wire

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in one of the event loops that a router may have."""

    def run_in_loop(work: Coroutine[Any, Any, Any]) -> Any:
        loop = request.param()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()

    return run_in_loop


async def fetch(connections: Connections, url: str, content: bytes | None = None) -> bytes:
    request = httpx.Request("POST" if content else "GET", f"{url}/x", content=content)
    response = await connections.handle_async_request(request)
    try:
        return (await read_up_to(1 << 20, response.aiter_raw()))[0]
    finally:
        await response.aclose()


def sockets() -> list[socket.socket]:
    """Copies of all connected TCP sockets of this process."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        try:
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            one.getpeername()
            found.append(one)
        except OSError:  # of another kind, or not connected
            one.close()
    return found


def test_neither_end_of_a_router_waits_for_acknowledgements() -> None:
    """Looks at the option, on both sides, after a request that keeps its connections."""
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        assert ask(router.url).status_code == 200
        delays = {}
        for each in sockets():
            with each:
                is_delayed = not each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                if each.getsockname() in one.peers:
                    delays["to the upstream"] = is_delayed
                elif each.getsockname()[1] == router.port:
                    delays["to the client"] = is_delayed
    assert delays == {"to the upstream": False, "to the client": False}


def test_connections_are_kept_and_used_again() -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        for _ in range(5):
            assert ask(router.url).status_code == 200
        assert len(one.peers) <= 2  # the other one is of a check


@pytest.mark.parametrize("size", [2, 300_000])
def test_clients_keep_their_connections_too(size: int) -> None:
    """A client that has the last byte of an answer sends its next request at once."""
    with upstream(say(200, b"x" * size)) as one, live_router(one.url, health_seconds=60) as router:
        connection = http.client.HTTPConnection(router.host, router.port, timeout=120)
        for _ in range(100):
            connection.request("POST", "/v1/completions", b"{}")
            assert len(connection.getresponse().read()) == size
        connection.close()


@pytest.mark.parametrize("body", [b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nPOISON!", b"junk"])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_follows_an_answer_never_answers_another_request(run, body: bytes, chunked) -> None:
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"

    async def work(url: str) -> None:
        connections = Connections()
        if chunked:
            assert await fetch(connections, url) == b"{}"
        else:
            with pytest.raises(httpx.RemoteProtocolError, match="longer than its Content-Length"):
                await fetch(connections, url)
        one.act = say(200, b"fine")
        assert await fetch(connections, url) == b"fine"
        await connections.aclose()

    with upstream(wire((chunks if chunked else OK) + body)) as one:
        run(work(one.url))
        assert len(one.peers) == 2


def test_an_idle_connection_that_receives_something_is_closed(run) -> None:
    asked, closed = threading.Event(), threading.Event()

    def answer_twice(handler) -> None:
        handler.wfile.write(OK)
        assert asked.wait(120)
        handler.wfile.write(OK)
        handler.connection.settimeout(120)
        with suppress(ConnectionResetError):
            assert handler.connection.recv(1) == b""
        closed.set()

    async def work(url: str) -> None:
        connections = Connections()
        assert await fetch(connections, url) == b"{}"
        one.act = say(200, b"fine")
        asked.set()
        assert await asyncio.to_thread(closed.wait, 120)
        assert await fetch(connections, url) == b"fine"
        await connections.aclose()

    with upstream(answer_twice) as one:
        run(work(one.url))


@pytest.mark.parametrize("end", [hang_up, None])
def test_an_answer_that_comes_before_the_request_is_read_counts(run, end) -> None:
    refused = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}"

    async def work(url: str) -> int:
        connections = Connections(20.0)
        request = httpx.Request("POST", url, content=b"x" * 20_000_000)
        response, body = await connections.fetch(request, 60, 1000)
        assert body == b"{}"
        await connections.aclose()
        return response.status_code

    with upstream(reads=False) as one:
        one.act = wire(refused, end or hang(one))
        assert run(work(one.url)) == 413


def test_a_slow_reader_holds_up_its_upstream_and_loses_nothing(run) -> None:
    pieces = [bytes([number]) * 50_000 for number in range(100)]

    async def work(url: str) -> bytes:
        connections = Connections(30.0)
        response = await connections.handle_async_request(httpx.Request("GET", f"{url}/x"))
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            await asyncio.sleep(0)
        await connections.aclose()
        return bytes(body)

    with upstream(stream(*pieces)) as one:
        assert run(work(one.url)) == b"".join(pieces)


def test_limits_of_whole_answers(run) -> None:
    async def work(url: str) -> None:
        connections = Connections()
        request = httpx.Request("GET", f"{url}/x")
        assert (await connections.fetch(request, 60, 10))[1] == b"0123456789"
        response, body = await connections.fetch(request, 60, 9)
        assert response.status_code == 200 and body is None
        one.act = hang(one)
        with pytest.raises(httpx.ReadTimeout):
            await connections.fetch(request, 0.1, 10)
        await connections.aclose()

    with upstream(say(200, b"0123456789")) as one:
        run(work(one.url))
        assert one.gone.wait(120)


def test_the_router_speaks_tls_and_trusts_whom_it_is_told_to(run, tmp_path) -> None:
    authority = trustme.CA()
    both = tmp_path / "both.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def work(url: str) -> None:
        connections = Connections(30.0, trusting)
        for _ in range(2):
            request = httpx.Request("GET", f"{url}/health")
            response, body = await connections.fetch(request, 60, 1000)
            assert response.status_code == 200 and body == b'{"status":"ok"}'
        await connections.aclose()
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await Connections().fetch(httpx.Request("GET", f"{url}/health"), 60, 1000)

    settings = ServerSettings(tls_cert=both, drain_seconds=5.0)
    with live_app(create_app(FakeEngine(), settings)) as server:
        run(work(server.url.replace("http:", "https:")))
