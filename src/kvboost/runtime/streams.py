"""How a caller receives an answer: as an iterator, an asynchronous iterator, or a future."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from kvboost.results import GenerationResult
from kvboost.runtime.request import RequestState

if TYPE_CHECKING:
    from typing_extensions import Self

_Event = list[str] | BaseException | None


class AnswerListener(Protocol):
    """Receives an answer from the loop. The loop's thread calls it, so it must not block."""

    def push(self, pieces: list[str]) -> None:
        """More text has arrived."""

    def end(self, error: BaseException | None) -> None:
        """The answer is complete, or failed with ``error``."""


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

    def __init__(self, state: RequestState) -> None:
        """Create it in the event loop that reads it."""
        self._state = state
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self._pieces: deque[str] = deque()
        self._ended = False
        self._cancel: Callable[[], None] = lambda: None

    def on_close(self, cancel: Callable[[], None]) -> None:
        """Calls ``cancel`` if the stream is closed before its end."""
        self._cancel = cancel

    def push(self, pieces: list[str]) -> None:
        self._put(pieces)

    def end(self, error: BaseException | None) -> None:
        self._put(error)

    def _put(self, event: _Event) -> None:
        with suppress(RuntimeError):  # the event loop is closed, and the reader with it
            self._event_loop.call_soon_threadsafe(self._events.put_nowait, event)

    @property
    def result(self) -> GenerationResult:
        """The result so far."""
        return self._state.result()

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return len(self._state.token_ids)

    @property
    def new_chunks(self) -> int:
        """How many chunks the request has added to the store so far."""
        return self._state.new_chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._pieces:
            if self._ended:
                raise StopAsyncIteration
            event = await self._events.get()
            if isinstance(event, list):
                self._pieces.extend(event)
                continue
            self._ended = True
            if event is not None:
                raise event
        return self._pieces.popleft()

    async def aclose(self) -> None:
        if not self._ended:
            self._cancel()
        while not self._ended:
            self._ended = not isinstance(await self._events.get(), list)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FutureAnswer:
    """The whole answer for a thread that waits: ``done`` holds the result, or the error."""

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
