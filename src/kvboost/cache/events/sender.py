"""Messages over ZeroMQ, as vLLM's ``ZmqEventPublisher`` sends them: subscribers receive all
messages, and may ask for those that they have missed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from kvboost.cache.events.replays import Replays
from kvboost.config import KVEvents
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    import zmq

MAX_UNSENT = 1000
"""Messages that wait for one slow subscriber; then it misses some. They are those of 20 seconds at
least."""
MAX_UNSENT_REPLAYS = 32
"""Messages that wait for one client that has asked for them; the others are kept once for all."""
MAX_RECEIVED = 1024
"""The bytes of a subscription or a request. Who sends more is disconnected."""
REPLAY_SECONDS = 0.1
"""The seconds between looks whether a subscriber has missed messages."""
BUSY_SECONDS = 0.005
"""The same while one is being answered."""
LINGER_SECONDS = 0.5
"""The most seconds that the last messages may take."""


class Sender:
    """Not thread-safe. May be made in one thread and used in another."""

    def __init__(self, settings: KVEvents) -> None:
        import msgspec
        import zmq

        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = settings.topic.encode()
        self._numbers = count()
        self._router: zmq.Socket[bytes] | None = None
        self.replays: Replays | None = None
        self._publish = self._open(zmq.PUB, settings.endpoint, MAX_UNSENT)
        if settings.replay_endpoint is not None:
            try:
                self._router = self._open(zmq.ROUTER, settings.replay_endpoint, MAX_UNSENT_REPLAYS)
            except ConfigError:
                self._publish.close(0)
                raise
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.replays = Replays(self._router, self._topic)
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where messages are published: the endpoint of the settings, with its port."""

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        """Never waits: a subscriber that is too slow misses messages."""
        number = next(self._numbers)
        payload = self._encode([time.time(), events, 0])
        self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        if self.replays is not None:
            self.replays.keep(number, payload)

    @property
    def replay_seconds(self) -> float | None:
        """The time that the next call of ``answer_replays`` may wait; None if none is due."""
        if self.replays is None:
            return None
        return BUSY_SECONDS if self.replays else REPLAY_SECONDS

    def answer_replays(self) -> None:
        """Sends some of what subscribers have asked for: all messages from a number on."""
        if self.replays is not None:
            self.replays.answer()

    def close(self) -> None:
        """ZeroMQ's own thread sends the last messages."""
        for socket in (self._publish, self._router):
            if socket is not None:
                socket.close(int(LINGER_SECONDS * 1000))

    def _open(self, kind: int, endpoint: str, most_unsent: int) -> zmq.Socket[bytes]:
        import zmq

        # The context of the process, which is never ended: ending one may wait for ever, even when
        # it is collected as garbage.
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        socket.set_hwm(most_unsent)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED)
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
