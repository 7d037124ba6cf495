"""Messages between the engine's process and an API process, errors and descriptions among them, and
the socket that carries them."""

from __future__ import annotations

import asyncio
import logging
import pickle
import selectors
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

import kvboost.errors
from kvboost.config import EngineConfig
from kvboost.errors import KVBoostError
from kvboost.results import AdapterInfo, Healing, ReuseReport, Timings, TokenLogprob
from kvboost.serve.errors import ApiError
from kvboost.serve.settings import ServerSettings
from kvboost.tokens.images import PlacedImage

T = TypeVar("T")

_HEAD_BYTES = 4
_READ_BYTES = 1 << 18


class WireError(msgspec.Struct, array_like=True):
    """An error on its way to the other process."""

    kind: str
    """The name of its class."""
    message: str
    attributes: dict[str, Any]


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """API → engine: answer a prompt. ``number`` names the answer from now on."""

    number: int
    token_ids: bytes
    """32-bit numbers."""
    max_new_tokens: int
    mode: str
    timeout: float | None
    options: dict[str, Any]
    images: tuple[tuple[PlacedImage, ...], int] | None = None
    """Of ``PlacedImages``: the images, as files, which are small, and its ``row_id``."""


class Call(msgspec.Struct, array_like=True, tag="call"):
    """API → engine: call a method. A Reply with the same number follows."""

    number: int
    method: str
    arguments: list[Any]
    options: dict[str, Any]


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """API → engine: end an answer or a call."""

    number: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """API → engine: it takes connections."""


class Reloaded(msgspec.Struct, array_like=True, tag="reloaded"):
    """API → engine: whether it has taken over the settings of a Reload."""

    number: int
    taken: bool


class Begun(msgspec.Struct, array_like=True):
    """The facts about an answer that are known when its first token is there."""

    reuse: ReuseReport
    timings: Timings
    estimated_ms: float | None
    """How long its prompt would take without reuse."""
    prompt_logprobs: list[TokenLogprob]


class Ended(msgspec.Struct, array_like=True):
    """The facts about an answer that are known when it has ended."""

    finish_reason: str
    timings: Timings
    reuse: ReuseReport | None
    """None: it has not changed since the beginning."""
    exact_from: int
    healing: Healing | None
    drafted_tokens: int
    accepted_tokens: int
    estimated_ms: float | None
    error: WireError | None


class News(msgspec.Struct, array_like=True):
    """The news about one answer since the last message."""

    number: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    begun: Begun | None = None
    ended: Ended | None = None


class Step(msgspec.Struct, array_like=True, tag="step"):
    """Engine → API: what a step of the loop has brought."""

    news: list[News]


class Accepted(msgspec.Struct, array_like=True, tag="accepted"):
    """Engine → API: these answers are queued."""

    numbers: list[int]


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Engine → API: this one is not."""

    number: int
    error: WireError


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """Engine → API: the result of a call."""

    number: int
    value: msgspec.Raw
    error: WireError | None = None


class Adapters(msgspec.Struct, array_like=True, tag="adapters"):
    """Engine → API: the adapters that are loaded now."""

    adapters: dict[str, AdapterInfo]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """Engine → API: the engine can serve no more requests."""

    error: WireError


class Reload(msgspec.Struct, array_like=True, tag="reload"):
    """Engine → API: take over new settings, which are pickled."""

    number: int
    settings: bytes


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Engine → API: finish what runs, and end."""


ToEngine = Ask | Call | Cancel | Ready | Reloaded
ToApi = Step | Accepted | Refused | Reply | Adapters | Failed | Reload | Stop


def _plain(value: Any) -> Any:
    """Numbers of numpy's, or a set, as Python's own. What explains a report stays here."""
    if callable(value):
        return None
    return list(value) if isinstance(value, (set, frozenset)) else value.tolist()


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def packed(value: object) -> msgspec.Raw:
    """``value`` as a part of a message."""
    return msgspec.Raw(_encode(value))


class Lost(Exception):
    """The other process has ended."""


class Pipe(Generic[T]):
    """One end of a connection to another process. Any thread may send; one thread receives. It
    never waits: what the socket does not take at once is kept until ``flush``."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        """``receives``: the union of the messages that arrive here."""
        end.setblocking(False)
        self.socket = end
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._arrived = bytearray()
        self._complete: deque[bytes] = deque()
        self._leaving: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self.on_full: Callable[[], object] = lambda: None
        """Called by any thread if something must be kept: ``flush`` is needed later."""

    def send(self, message: object) -> None:
        """Sends a message, or begins to. One to a process that has ended is dropped."""
        self.send_bytes(_encode(message))

    def send_bytes(self, data: bytes) -> None:
        framed = memoryview(len(data).to_bytes(_HEAD_BYTES, "little") + data)
        with self._lock:
            was_empty = not self._leaving
            self._leaving.append(framed)
            is_full = was_empty and not self._send_waiting()
        if is_full:
            self.on_full()

    def flush(self) -> bool:
        """Sends what was kept, as far as the socket takes it; whether that is all."""
        with self._lock:
            return self._send_waiting()

    def _send_waiting(self) -> bool:
        while self._leaving:
            try:
                sent = self.socket.send(self._leaving[0])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._leaving.clear()
                return True
            if sent < len(self._leaving[0]):
                self._leaving[0] = self._leaving[0][sent:]
            else:
                self._leaving.popleft()
        return True

    def receive(self) -> list[T]:
        """The messages that have arrived. Raises Lost if there are none and never will be."""
        is_lost = self._read()
        found = [self._decode(self._complete.popleft()) for _ in range(len(self._complete))]
        if is_lost and not found:
            raise Lost
        return found

    def receive_bytes(self) -> bytes:
        """Waits for one message, and returns it as it is."""
        while not self._complete:
            self.wait()
            if self._read() and not self._complete:
                raise Lost
        return self._complete.popleft()

    def _read(self) -> bool:
        """Takes in what has arrived; whether the other process has ended."""
        is_lost = False
        while True:
            try:
                data = self.socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self._arrived += data
            is_lost = not data
            if len(data) < _READ_BYTES:
                break
        start = 0
        while (size := self._size_at(start)) is not None:
            end = start + _HEAD_BYTES + size
            self._complete.append(bytes(self._arrived[start + _HEAD_BYTES : end]))
            start = end
        del self._arrived[:start]
        return is_lost

    def _size_at(self, start: int) -> int | None:
        """The size of the message that begins at ``start``; None if it is not complete."""
        head = self._arrived[start : start + _HEAD_BYTES]
        size = int.from_bytes(head, "little")
        is_there = len(self._arrived) >= start + _HEAD_BYTES + size
        return size if len(head) == _HEAD_BYTES and is_there else None

    def wait(self) -> None:
        """Waits until something arrives; sends meanwhile what was kept."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            while True:
                interest = selectors.EVENT_READ
                if not self.flush():
                    interest |= selectors.EVENT_WRITE
                selector.modify(self.socket, interest)
                if any(events & selectors.EVENT_READ for _, events in selector.select()):
                    return

    def serve_in(self, loop: asyncio.AbstractEventLoop, receive: Callable[[], None]) -> None:
        """Has ``loop`` call ``receive`` when something arrives, and send what was kept."""
        self.on_full = lambda: loop.call_soon_threadsafe(self._write_later, loop)
        loop.add_reader(self.socket, receive)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends that."""
        self.on_full = lambda: None
        loop.remove_reader(self.socket)
        loop.remove_writer(self.socket)

    def _write_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.socket.fileno() >= 0:
            loop.add_writer(self.socket, self._write, loop)

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.flush():
            loop.remove_writer(self.socket)

    def shut(self) -> None:
        """Ends the connection. Whoever receives is told, also at this end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


logger = logging.getLogger("kvboost.serve")

_PLAIN = (str, int, float, bool, type(None))


class EngineFailure(Exception):
    """A defect showed in the engine's process, whose log says where."""


def to_wire(error: BaseException) -> WireError:
    """``error`` as a message. Where a defect is shows only in this process, so it is logged here:
    without its message, which may have a prompt in it."""
    if not isinstance(error, KVBoostError):
        where = "".join(traceback.format_tb(error.__traceback__))
        logger.error("a request failed with %s in the engine\n%s", type(error).__name__, where)
    attributes = {name: one for name, one in vars(error).items() if isinstance(one, _PLAIN)}
    return WireError(type(error).__name__, str(error), attributes)


def from_wire(error: WireError) -> Exception:
    """The same error again. Its class is one of ``kvboost.errors``, or it was a defect."""
    kind: Any = getattr(kvboost.errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, KVBoostError)):
        return EngineFailure(f"{error.kind}: {error.message}")
    takes_others = "__init__" in vars(kind)  # it makes its message of what it takes
    made: KVBoostError = kind.__new__(kind, error.message) if takes_others else kind(error.message)
    vars(made).update(error.attributes)
    return made


def engine_lost() -> ApiError:
    """The engine's process has ended."""
    said = "the engine's process has ended; the server must be started again"
    return ApiError(503, said, "engine_lost", retry_after=5)


@dataclass(frozen=True)
class EngineDescription:
    """The model, and how the engine runs it."""

    model_name: str
    context_length: int | None
    vocab_size: int
    eos_ids: frozenset[int]
    tokenizer: bytes
    """Pickled, which takes a while."""
    image_reader: bytes
    """The reader of images, or the reason why the model takes none; pickled."""
    config: EngineConfig
    facts: dict[str, Any]
    dimensions: int
    """Those of its embeddings."""
    adapters: dict[str, AdapterInfo]
    """Those that are loaded at first."""

    @classmethod
    def of(cls, engine: kvboost.KVBoost, tokenizer: bytes) -> EngineDescription:
        same = ("model_name", "context_length", "vocab_size", "eos_ids", "config")
        return cls(
            **{name: getattr(engine, name) for name in same},
            tokenizer=tokenizer,
            image_reader=pickle.dumps(engine.image_reader),
            facts=engine.facts(),
            dimensions=engine.embedder.dimensions,
            adapters=engine.adapters(),
        )


@dataclass(frozen=True)
class EmbeddingDescription:
    """A model for embeddings."""

    name: str
    max_tokens: int
    vocab_size: int
    dimensions: int
    tokenizer: Any

    @classmethod
    def of(cls, model: kvboost.EmbeddingModel) -> EmbeddingDescription:
        return cls(
            model.name, model.max_tokens, model.vocab_size, model.dimensions, model.tokenizer
        )


@dataclass(frozen=True)
class Start:
    """The message with which an API process starts."""

    engine: EngineDescription
    settings: ServerSettings
    """Without a model for embeddings."""
    embedding_model: EmbeddingDescription | None

    def packed(self) -> bytes:
        return pickle.dumps(self)
