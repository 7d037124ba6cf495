"""A real server of the test's own, on a thread and a port nobody else has."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn.server
from starlette.applications import Starlette

from kvboost.deploy.proxy import create_router
from kvboost.deploy.state import ProxySettings
from kvboost.serve.app import create_app
from kvboost.serve.process import Server, bind
from kvboost.serve.settings import ServerSettings


class _ShortPauses:
    """``asyncio`` for uvicorn, which asks every tenth of a second whether it is to stop, and then
    pauses for as long again. Tests stop hundreds of servers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


uvicorn.server.asyncio = _ShortPauses()  # type: ignore[assignment]


@dataclass(frozen=True)
class LiveServer:
    host: str
    port: int
    server: Server

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def live_server(engine: Any, *, loop: str = "auto", **settings: Any) -> Iterator[LiveServer]:
    """``engine`` on the network, until the block is left. ``loop``: uvicorn's name of the event
    loop."""
    options = {"drain_seconds": 5.0, **settings}
    with live_app(create_app(engine, ServerSettings(**options)), loop=loop) as server:
        yield server


@contextmanager
def live_router(
    *upstreams: str, limits: dict[str, Any] | None = None, **settings: Any
) -> Iterator[LiveServer]:
    """A router for ``upstreams`` on the network, which has checked them once."""
    options = {"health_seconds": 0.1, **settings}
    limited = ServerSettings(**{"drain_seconds": 5.0, **(limits or {})})
    with live_app(create_router(ProxySettings(upstreams, limits=limited, **options))) as router:
        yield router


@contextmanager
def live_app(app: Starlette, port: int = 0, *, loop: str = "auto") -> Iterator[LiveServer]:
    """``app`` on the network, until the block is left."""
    server = Server(app, lambda: None)
    server.config.loop = loop
    with running(server, bind("127.0.0.1", port)) as live:
        yield live


@contextmanager
def running(server: Server, listening: socket.socket) -> Iterator[LiveServer]:
    """A server in a thread, from when it is ready until the block is left."""
    ready = threading.Event()
    server._on_ready = ready.set
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert ready.wait(20), "the server did not start"
    try:
        yield LiveServer("127.0.0.1", listening.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def connect(
    server: LiveServer,
    body: bytes,
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    length: int | None = None,
    key: str = "none",
) -> socket.socket:
    """A connection that has sent one request."""
    connection = socket.create_connection((server.host, server.port), timeout=10)
    size = len(body) if length is None else length
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n"
    connection.sendall(f"{head}content-length: {size}\r\n\r\n".encode() + body)
    return connection


def read_until(connection: socket.socket, sought: bytes) -> bytes:
    """What comes up to ``sought``, which must."""
    seen = b""
    while sought not in seen:
        piece = connection.recv(100_000)
        assert piece, f"it ended with {seen[-200:]!r}"
        seen += piece
    return seen


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The data of every server-sent event before the last, which is [DONE]."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
