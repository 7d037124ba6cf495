"""An upstream that does what a test tells it: refuse, break off, hang, or answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Handler = BaseHTTPRequestHandler


@dataclass
class Scripted:
    """``act`` answers everything but ``/ready`` and ``/health``."""

    act: Callable[[Handler], None]
    ready: int = 200
    health: int = 200
    url: str = ""
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of all requests but checks."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when ``hang`` sees the client leave."""


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


def stream(*pieces: bytes, then: Callable[[Handler], None] | None = None) -> Callable:
    """Sends events in chunks; then ends, or does ``then``."""

    def act(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
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


@contextmanager
def upstream(act: Callable[[Handler], None] | None = None, **options: int) -> Iterator[Scripted]:
    fake = Scripted(act or say(200), **options)

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            checks = {"/ready": fake.ready, "/health": fake.health}
            if self.path in checks:
                say(checks[self.path])(self)
            else:
                self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"] or 0)))

        def _answer(self, body: bytes) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            fake.asked.append((self.path, headers, body))
            fake.act(self)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
