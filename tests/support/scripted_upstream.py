"""An upstream that does what a test tells it: refuse, break off, hang, or answer."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Handler = BaseHTTPRequestHandler


def say(status: int, body: bytes = b"{}", **headers: str) -> Callable[[Handler], None]:
    """Answers with a whole body."""

    def act(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return act


def lists(*names: str, by: str = "test") -> Callable[[Handler], None]:
    """Answers with a list of models."""
    entries = [{"id": name, "object": "model", "owned_by": by} for name in names]
    return say(200, json.dumps({"object": "list", "data": entries}).encode())


@dataclass
class Scripted:
    """``act`` answers everything but ``/ready``, ``/health`` and ``/v1/models``."""

    act: Callable[[Handler], None]
    ready: int = 200
    health: int = 200
    check: bytes = b"{}"
    """The body of answers to ``/ready`` and ``/health``."""
    models: Callable[[Handler], None] = field(default_factory=lambda: say(404))
    reads: bool = True
    """Whether bodies are read."""
    url: str = ""
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of all requests that ``act`` answers."""
    asked_models: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers of requests for the list of models."""
    peers: list[tuple[str, int]] = field(default_factory=list)
    """The other end of each connection."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when ``hang`` sees the client leave."""


def stream(
    *pieces: bytes,
    then: Callable[[Handler], None] | None = None,
    kind: str = "text/event-stream",
) -> Callable:
    """Sends pieces in chunks; then ends, or does ``then``."""

    def act(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", kind)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            handler.wfile.flush()
        if then is not None:
            then(handler)
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return act


def hang_up(handler: Handler) -> None:
    """Closes the connection in the middle of whatever it is."""
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def hang(fake: Scripted) -> Callable[[Handler], None]:
    """Says nothing more, and notes when the client leaves."""

    def act(handler: Handler) -> None:
        handler.wfile.flush()
        handler.connection.settimeout(120)
        if handler.connection.recv(1) == b"":
            fake.gone.set()
        handler.close_connection = True

    return act


def wire(data: bytes, then: Callable[[Handler], None] | None = None) -> Callable:
    """Sends ``data`` as it is; then keeps the connection, or does ``then``."""

    def act(handler: Handler) -> None:
        handler.wfile.write(data)
        handler.wfile.flush()
        if then is not None:
            then(handler)

    return act


@contextmanager
def upstream(
    act: Callable[[Handler], None] | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> Iterator[Scripted]:
    fake = Scripted(act or say(200), **options)

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            fake.peers.append(self.client_address)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            checks = {"/ready": fake.ready, "/health": fake.health}
            if self.path in checks:
                say(checks[self.path], fake.check)(self)
            elif self.path.partition("?")[0] == "/v1/models":
                fake.asked_models.append((self.path, self._given()))
                fake.models(self)
            else:
                self._answer()

        def do_POST(self) -> None:
            self._answer()

        do_HEAD = do_DELETE = do_OPTIONS = do_POST

        def _given(self) -> dict[str, str]:
            return {name.lower(): value for name, value in self.headers.items()}

        def _answer(self) -> None:
            size = int(self.headers["content-length"] or 0) if fake.reads else 0
            fake.asked.append((self.path, self._given(), self.rfile.read(size)))
            fake.act(self)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients may leave at any moment."""

    with Server(("127.0.0.1", 0), Answering) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        fake.url = f"{scheme}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
