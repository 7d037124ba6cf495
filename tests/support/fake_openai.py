"""A server that speaks OpenAI's chat and text completions and knows no model.

In a test: ``with serving() as server: server.url, server.bodies``. As a process, on a port:
``python fake_openai.py PORT``, or ``FakePeer()`` where a benchmark wants a peer.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fake:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    pause_s: float = 0.0
    """Before every piece of text."""
    refuse: str = ""
    """Requests with this text in their last message are answered with 429."""
    together: int = 1
    """Answers begin once so many requests run."""
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.together, timeout=60)


def handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "fake"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with fake.lock:
                fake.bodies.append(body)
                fake.running += 1
                fake.most_running = max(fake.most_running, fake.running)
            try:
                fake.barrier.wait()
                self._answer(body)
            finally:
                with fake.lock:
                    fake.running -= 1

        def _answer(self, body: dict[str, Any]) -> None:
            if fake.refuse and fake.refuse in body["messages"][-1]["content"]:
                self._send(429, json.dumps({"error": {"message": "the queue is full"}}))
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self._chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for number in range(body["max_tokens"]):
                time.sleep(fake.pause_s)
                self._chunk({"choices": [{"delta": {"content": f"w{number} "}}]})
            self.wfile.write(b": a comment\n\n")
            self._chunk({"choices": [{"delta": {}, "finish_reason": "length"}]})
            said = [message["content"] for message in body.get("messages", ())]
            words = sum(len(text.split()) for text in (*said, body.get("prompt", "")))
            usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
            details = {"prompt_tokens_details": {"cached_tokens": words // 2}}
            self._chunk({"choices": [], "usage": {**usage, **details}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _chunk(self, chunk: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    return Handler


@contextmanager
def serving(**options: Any) -> Iterator[Fake]:
    fake = Fake(**options)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(fake)) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        server.shutdown()
        thread.join()


class FakePeer:
    """Runs a small program instead of a server."""

    name = "fake"
    ready_path = "/health"

    def __init__(self, program: str | None = None) -> None:
        self._program = program

    def missing(self, setting: object) -> str | None:
        return None

    def version(self, setting: Any) -> str:
        return "fake 1"

    def command(self, setting: object, port: int) -> list[str]:
        if self._program is None:
            return [sys.executable, __file__, str(port)]
        return [sys.executable, "-c", self._program, str(port)]

    def environment(self, setting: object) -> dict[str, str]:
        return {"SAID": "from the peer"}

    def settings(self, setting: object) -> dict[str, object]:
        return {"weights": "none"}


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), handler(Fake())).serve_forever()
