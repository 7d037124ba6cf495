"""Messages that subscribers have missed and ask for, over a ZeroMQ socket that anyone may reach.

All clients are answered in turns, a few messages each, between the messages that are published: no
client makes others, the publisher or the end of the server wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

KEPT_BYTES = 64 * 1024**2
"""Payloads that are kept for subscribers that have missed some."""
MOST_CLIENTS = 64
"""Clients that are answered at a time; the others wait."""
MOST_REQUESTS = 256
"""Requests that are read at a time. A client that asks again is answered anew."""
MOST_MESSAGES = 16
"""Messages that one client gets at a time."""
STALLED_SECONDS = 2.0
"""A client that takes nothing for this long gets no more."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


@dataclass
class _Client:
    wanted: int
    """The number of the next message."""
    served: float
    """When it last took one."""


class Replays:
    """Not thread-safe. ``router`` is a ROUTER socket that refuses to send to clients that are gone
    or take nothing."""

    def __init__(
        self, router: zmq.Socket[bytes], topic: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        self._topic = topic
        self._clock = clock
        self._payloads: dict[int, bytes] = {}
        self._first = 0
        """The number of the oldest message that is kept."""
        self._nbytes = 0
        self._clients: dict[bytes, _Client] = {}

    def __len__(self) -> int:
        """The number of clients that are being answered."""
        return len(self._clients)

    def keep(self, number: int, payload: bytes) -> None:
        """A message was published; ``number`` is one more than that of the last."""
        if not self._payloads:
            self._first = number
        self._payloads[number] = payload
        self._nbytes += len(payload)
        while self._nbytes > KEPT_BYTES:
            self._nbytes -= len(self._payloads.pop(self._first))
            self._first += 1

    def answer(self) -> None:
        """Reads some requests, and sends some messages to each client that waits for them."""
        self._read_requests()
        for name in list(self._clients):
            self._serve(name)

    def _read_requests(self) -> None:
        for _ in range(MOST_REQUESTS):
            if len(self._clients) >= MOST_CLIENTS or not self._router.poll(0):
                return
            name, *request = self._router.recv_multipart()
            if len(request) == 2 and len(request[1]) == 8:
                client = self._clients.setdefault(name, _Client(0, self._clock()))
                client.wanted = int.from_bytes(request[1], "big")

    def _serve(self, name: bytes) -> None:
        import zmq

        client = self._clients[name]
        end = self._first + len(self._payloads)
        try:
            for _ in range(MOST_MESSAGES):
                client.wanted = max(client.wanted, self._first)
                if client.wanted >= end:
                    self._send(name, b"", END_OF_REPLAY, b"")
                    del self._clients[name]
                    return
                number = client.wanted.to_bytes(8, "big")
                self._send(name, self._topic, number, self._payloads[client.wanted])
                client.wanted += 1
                client.served = self._clock()
        except zmq.Again:  # it has enough to take for now
            if self._clock() - client.served > STALLED_SECONDS:
                del self._clients[name]
        except zmq.ZMQError:  # it is gone
            del self._clients[name]

    def _send(self, name: bytes, *frames: bytes) -> None:
        import zmq

        self._router.send_multipart((name, b"", *frames), zmq.NOBLOCK)
