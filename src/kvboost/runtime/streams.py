"""How a caller receives an answer: as an iterator, an asynchronous iterator, or a future."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvboost.results import GenerationResult
from kvboost.runtime.request import RequestState

if TYPE_CHECKING:
    from typing import Self


class AnswerReader(Protocol):
    """Receives an answer piece by piece. It must neither block nor raise."""

    def push(self, pieces: list[str]) -> None:
        """More text has arrived."""

    def end(self, error: BaseException | None) -> None:
        """The answer is complete, or failed with ``error``."""


class Mailbox(Protocol):
    """Takes calls of the loop's thread to where they are made: an event loop, or a connection to
    another process."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], /, *arguments: Any) -> Any: ...


class AnswerListener(Protocol):
    """Receives an answer from the loop. It must neither block nor raise."""

    @property
    def event_loop(self) -> Mailbox | None:
        """The mailbox through which it is called; None: the loop's thread calls it."""

    def push(self, pieces: Any, /) -> None:
        """More has arrived: pieces of text, or token ids if its request shows ids."""

    def end(self, error: BaseException | None, /) -> None:
        """The answer is complete, or failed with ``error``."""


class AnswerState(Protocol):
    """How far an answer is, here or in another process."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def rows(self) -> int: ...

    @property
    def new_chunks(self) -> int: ...

    def result(self) -> GenerationResult: ...


class Outbox:
    """Text and ends of answers, on their way to listeners. What is for event loops and connections
    stays here until ``send``, which calls each of them once, for all answers that it reads: waking
    one takes longer than anything it does with a piece. Only the loop's thread uses it."""

    def __init__(self) -> None:
        self._waiting: dict[Mailbox, list[Callable[[], None]]] = {}

    def push(self, listener: AnswerListener, pieces: Sequence[str] | Sequence[int]) -> None:
        self._add(listener, partial(listener.push, pieces))

    def end(self, listener: AnswerListener, error: BaseException | None) -> None:
        self._add(listener, partial(listener.end, error))

    def send(self) -> None:
        """Hands over everything, in the order in which it came."""
        waiting, self._waiting = self._waiting, {}
        for event_loop, calls in waiting.items():
            with suppress(RuntimeError):  # the event loop is closed, and the readers with it
                event_loop.call_soon_threadsafe(_call_all, calls)

    def _add(self, listener: AnswerListener, call: Callable[[], None]) -> None:
        if listener.event_loop is None:
            call()
        else:
            self._waiting.setdefault(listener.event_loop, []).append(call)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


class TextStream:
    """An iterator of text pieces. ``result`` is complete once the stream is exhausted or closed;
    closing it early keeps what was read and gives ``finish_reason="cancelled"``. Its timings leave
    out the time that the caller spends between two pieces."""

    def __init__(self, pieces: Generator[str, None, None], state: RequestState) -> None:
        self._pieces = pieces
        self._state = state
        self._left_at = time.perf_counter()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        self._state.clock.leave_out(time.perf_counter() - self._left_at)
        try:
            return next(self._pieces)
        finally:
            self._left_at = time.perf_counter()

    @property
    def result(self) -> GenerationResult:
        """The result so far."""
        return self._state.result()

    def close(self) -> None:
        self._state.clock.leave_out(time.perf_counter() - self._left_at)
        self._state.closing = True
        self._pieces.close()
        self._left_at = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTextStream:
    """An asynchronous iterator of text pieces. ``result`` is complete once it is exhausted or
    closed; closing it early, or leaving its ``async with``, cancels the request within one step
    and keeps what was read."""

    def __init__(self, state: AnswerState) -> None:
        """Create it in the event loop that reads it."""
        self._state = state
        self.event_loop = asyncio.get_running_loop()
        self._pieces: deque[str] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._reader: AnswerReader | None = None
        self._cancel: Callable[[], None] = lambda: None

    def on_close(self, cancel: Callable[[], None]) -> None:
        """Calls ``cancel`` if the stream is closed before its end."""
        self._cancel = cancel

    def read_by(self, reader: AnswerReader) -> None:
        """Hands all pieces and the end to ``reader``, in the event loop, when they arrive: then
        nothing is left to iterate over, and no task need wait."""
        self._reader = reader
        if self._pieces:
            reader.push(list(self._pieces))
            self._pieces.clear()
        if self._ended:
            reader.end(self._error)

    def push(self, pieces: list[str]) -> None:
        if self._reader is not None:
            self._reader.push(pieces)
        else:
            self._pieces.extend(pieces)
            self._changed.set()

    def end(self, error: BaseException | None) -> None:
        self._ended, self._error = True, error
        self._changed.set()
        if self._reader is not None:
            self._reader.end(error)

    @property
    def result(self) -> GenerationResult:
        """The result so far."""
        return self._state.result()

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return len(self._state.token_ids)

    @property
    def num_rows(self) -> int:
        """How many rows of the prompt and the answer are in place so far. Moved rows count when all
        rows of the prompt are in place."""
        return self._state.rows

    @property
    def new_chunks(self) -> int:
        """How many chunks the request has added to the store so far."""
        return self._state.new_chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._pieces:
            if self._ended:
                error, self._error = self._error, None
                raise StopAsyncIteration if error is None else error
            await self._change()
        return self._pieces.popleft()

    async def aclose(self) -> None:
        if not self._ended:
            self._cancel()
        while not self._ended:
            await self._change()
        self._pieces.clear()
        self._error = None

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FutureAnswer:
    """The whole answer for a thread that waits: ``done`` holds the result, or the error."""

    event_loop = None

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self.done: Future[GenerationResult] = Future()

    def push(self, pieces: list[str]) -> None:
        """Only the complete answer matters."""

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(self._state.result())
