"""A subscriber to KV events, which decodes them as vLLM documents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import zmq


class Subscriber:
    """Knows which blocks are announced, and complains about what no router could follow."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.topics: set[bytes] = set()
        self.numbers: list[int] = []
        self.payloads: list[bytes] = []
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """The announced blocks: the block before each, and its tokens."""

    def join(self, ping: Callable[[], object]) -> None:
        """Makes the publisher publish until a message arrives: a subscriber that has just connected
        may miss some."""
        for _ in range(2000):
            ping()
            if self._socket.poll(100):
                return
        raise AssertionError("no message arrived")

    def listen_until(self, done: Callable[[Subscriber], bool]) -> None:
        while not done(self):
            assert self._socket.poll(20_000), f"no message in 20 s after {self.events[-3:]}"
            topic, number, payload = self._socket.recv_multipart()
            assert len(number) == 8
            self.topics.add(topic)
            self.numbers.append(int.from_bytes(number, "big"))
            self.payloads.append(payload)
            seconds, events, rank = msgspec.msgpack.decode(payload)
            assert isinstance(seconds, float) and rank == 0
            for event in events:
                self._follow(event)

    def _follow(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.blocks.pop(name, None)
        else:
            assert event["type"] == "BlockStored"
            size, before = event["block_size"], event["parent_block_hash"]
            tokens = event["token_ids"]
            assert len(tokens) == size * len(event["block_hashes"])
            for number, name in enumerate(event["block_hashes"]):
                self.blocks[name] = before, tuple(tokens[number * size : (number + 1) * size])
                before = name

    @property
    def texts(self) -> set[tuple[int, ...]]:
        """The announced texts, from their first token to the end of each block."""
        found: set[tuple[int, ...]] = set()
        for name in self.blocks:
            tokens: tuple[int, ...] = ()
            at: int | None = name
            while at is not None and at in self.blocks:
                at, block = self.blocks[at]
                tokens = block + tokens
            if at is None:
                found.add(tokens)
        return found

    def close(self) -> None:
        self._socket.close(0)
