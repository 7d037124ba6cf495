"""An API process's connection to the engine: calls of its methods, and answers."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from kvboost.serve.remote import wire

if TYPE_CHECKING:
    from kvboost.serve.remote.answers import RemoteStream

T = TypeVar("T")


class Link:
    """Sends to the engine from any thread; receives in the event loop of :meth:`attach`."""

    def __init__(self, pipe: wire.Pipe[wire.ToApi]) -> None:
        self._pipe = pipe
        self._home = threading.get_ident()
        """The thread of the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[msgspec.Raw]] = {}
        self._answers: dict[int, RemoteStream] = {}
        self._arrived: deque[wire.ToApi] = deque()
        """Messages that arrived while a call was waited for."""
        self.is_lost = False
        self.on_adapters: Callable[[wire.Adapters], None] = lambda _: None
        self.on_failed: Callable[[Exception], None] = lambda _: None
        self.on_reload: Callable[[wire.Reload], None] = lambda _: None
        self.on_stop: Callable[[], None] = lambda: None
        """The engine stops, or has ended."""

    def attach(self) -> None:
        """Receives in the event loop that runs, from now on."""
        self._loop = asyncio.get_running_loop()
        self._home = threading.get_ident()
        self._pipe.serve_in(self._loop, self._receive)
        self._loop.call_soon(self._take_arrived)

    def send(self, message: wire.ToEngine) -> None:
        self._pipe.send(message)

    def ask(self, answer: RemoteStream, make: Callable[[int], wire.ToEngine]) -> int:
        """Sends what ``make`` gives for a new number, which it returns; ``answer`` receives it."""
        if self.is_lost:
            raise wire.engine_lost()
        number = next(self._numbers)
        self._answers[number] = answer
        self.send(make(number))
        return number

    def call(self, method: str, *arguments: Any, returns: Any = Any, **options: Any) -> Any:
        """The result of a method of the engine. In the event loop's thread only methods that take a
        few milliseconds may be called so: it waits."""
        _, future = self._start(method, arguments, options)
        if threading.get_ident() == self._home:
            self._await_reply(future)
        return _read(future.result(), returns)

    async def acall(self, method: str, *arguments: Any, returns: Any = Any, **options: Any) -> Any:
        """The same for coroutines. If the task is cancelled, so is what the engine does."""
        number, future = self._start(method, arguments, options)
        try:
            return _read(await asyncio.wrap_future(future), returns)
        except asyncio.CancelledError:
            self.send(wire.Cancel(number))
            raise

    def post(self, method: str, *arguments: Any) -> None:
        """Calls a method whose result does not matter."""
        self.send(wire.Call(next(self._numbers), method, list(arguments), {}))

    def _start(
        self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[int, Future[msgspec.Raw]]:
        if self.is_lost:
            raise wire.engine_lost()
        number, future = next(self._numbers), Future[msgspec.Raw]()
        self._calls[number] = future
        self.send(wire.Call(number, method, list(arguments), options))
        return number, future

    def _await_reply(self, future: Future[msgspec.Raw]) -> None:
        """Receives until ``future`` is done. Answers that arrive meanwhile are taken later: their
        readers must not be called in the middle of something else."""
        while not future.done():
            self._pipe.wait()
            try:
                messages = self._pipe.receive()
            except wire.Lost:
                self._lose()
                return
            for message in messages:
                if isinstance(message, wire.Reply):
                    self._reply(message)
                else:
                    self._arrived.append(message)
        if self._arrived and self._loop is not None:
            self._loop.call_soon(self._take_arrived)

    def _receive(self) -> None:
        try:
            self._arrived.extend(self._pipe.receive())
        except wire.Lost:
            self._lose()
        self._take_arrived()

    def _take_arrived(self) -> None:
        while self._arrived:
            self._take(self._arrived.popleft())

    def _take(self, message: wire.ToApi) -> None:
        match message:
            case wire.Step():
                for news in message.news:
                    if (answer := self._answers.get(news.number)) is not None:
                        if news.ended is not None:
                            del self._answers[news.number]
                        answer.take(news)
            case wire.Accepted():
                for number in message.numbers:
                    if (answer := self._answers.get(number)) is not None:
                        answer.accepted()
            case wire.Refused():
                if (answer := self._answers.pop(message.number, None)) is not None:
                    answer.refused(wire.from_wire(message.error))
            case wire.Reply():
                self._reply(message)
            case wire.Adapters():
                self.on_adapters(message)
            case wire.Failed():
                self.on_failed(wire.from_wire(message.error))
            case wire.Reload():
                self.on_reload(message)
            case wire.Stop():
                self.on_stop()

    def _reply(self, reply: wire.Reply) -> None:
        future = self._calls.pop(reply.number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if reply.error is not None:
            future.set_exception(wire.from_wire(reply.error))
        else:
            future.set_result(reply.value)

    def _lose(self) -> None:
        """The engine's process has ended: so do all answers and calls, with an error."""
        if not self.is_lost:
            self.close()
            self.on_stop()

    def close(self) -> None:
        """Ends all answers and calls: threads that wait would keep the process from ending."""
        self.is_lost = True
        if self._loop is not None:
            self._pipe.leave(self._loop)
        for future in list(self._calls.values()):
            if future.set_running_or_notify_cancel():
                future.set_exception(wire.engine_lost())
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.refused(wire.engine_lost())


def _read(value: msgspec.Raw, kind: Any) -> Any:
    return msgspec.msgpack.decode(value, type=cast(Any, kind))
