"""Messages over ZeroMQ, as vLLM's ``ZmqEventPublisher`` sends them: subscribers receive all
messages, and may ask for those that they have missed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from kvboost.config import KVEvents
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    import zmq

MAX_UNSENT = 10_000
"""Messages that wait for one slow subscriber; then it misses some."""
REPLAY_BYTES = 64 * 1024**2
"""Payloads that are kept for subscribers that have missed some."""
LINGER_SECONDS = 0.5
"""How long the last messages may take."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class Sender:
    """Not thread-safe. May be made in one thread and used in another."""

    def __init__(self, settings: KVEvents) -> None:
        import msgspec
        import zmq

        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = settings.topic.encode()
        self._numbers = count()
        self._sent: deque[tuple[bytes, bytes]] = deque()
        self._sent_bytes = 0
        self._replay: zmq.Socket[bytes] | None = None
        self._publish = self._open(zmq.PUB, settings.endpoint)
        if settings.replay_endpoint is not None:
            try:
                self._replay = self._open(zmq.ROUTER, settings.replay_endpoint)
            except ConfigError:
                self._publish.close(0)
                raise
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where messages are published: the endpoint of the settings, with its port."""

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        """Never waits: a subscriber that is too slow misses messages."""
        number = next(self._numbers).to_bytes(8, "big")
        payload = self._encode([time.time(), events, 0])
        self._publish.send_multipart((self._topic, number, payload))
        if self._replay is not None:
            self._sent.append((number, payload))
            self._sent_bytes += len(payload)
            while self._sent_bytes > REPLAY_BYTES:
                self._sent_bytes -= len(self._sent.popleft()[1])

    @property
    def has_replay(self) -> bool:
        return self._replay is not None

    def answer_replays(self) -> None:
        """Sends what subscribers have asked for: all messages from a number on."""
        while self._replay is not None and self._replay.poll(0):
            client, *request = self._replay.recv_multipart()
            if len(request) != 2 or len(request[1]) != 8:
                continue
            for number, payload in self._sent:
                if number >= request[1]:
                    self._reply(client, self._topic, number, payload)
            self._reply(client, b"", END_OF_REPLAY, b"")

    def _reply(self, client: bytes, *frames: bytes) -> None:
        """A client that takes no data, or is gone, gets no more."""
        import zmq

        assert self._replay is not None
        try:
            self._replay.send_multipart((client, b"", *frames), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        """ZeroMQ's own thread sends the last messages."""
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close(int(LINGER_SECONDS * 1000))

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        import zmq

        # The context of the process, which is never ended: ending one may wait for ever, even when
        # it is collected as garbage.
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        socket.set_hwm(MAX_UNSENT)
        binds = kind == zmq.ROUTER or "*" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        try:
            if binds or "::" in endpoint:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(
                f"KV events cannot be published at {endpoint}: {error.strerror}; use another "
                "endpoint, such as tcp://*:5557"
            ) from None
        return socket
