"""Responses that are sent piece by piece, to clients that may close their connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.serve.errors import ClientGone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_ANY_TEXT = "\0any text\0"


def _as_plain(value: Any) -> Any:
    """A number or text of a type that msgspec does not know, such as one of numpy's floats."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_json = msgspec.json.Encoder(enc_hook=_as_plain).encode
"""The JSON of a value, with no blanks in between."""


class JsonBytes(Response):
    """A document as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json(content)


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    if name is None:
        return b"data: %b\n\n" % _json(value)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json(value))


def line(value: Mapping[str, Any]) -> bytes:
    """One line of NDJSON."""
    return _json(value) + b"\n"


class TextEvents:
    """Events that differ in one text: everything else is encoded once."""

    def __init__(self, make: Callable[[str], Mapping[str, Any]]) -> None:
        """``make`` gives the value of the event with a text."""
        value = event(make(_ANY_TEXT))
        self._before, _, self._after = value.rpartition(_json(_ANY_TEXT))

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _json(text), self._after)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of ``work``. If it takes longer than ``seconds``, unless these are 0, cancels it
    and raises TimeoutError."""
    async with asyncio.timeout(seconds or None):
        return await work


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. If the client closes its connection first, cancels ``work``, waits
    until it has ended and raises ClientGone. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    try:
        # A task of its own for the waiting would take longer than most of the work.
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as waiting:
                task.add_done_callback(lambda _: _end(waiting))
                while (await receive())["type"] != "http.disconnect":
                    pass
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _end(waiting: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it has ended already
        waiting.reschedule(0)


class LiveResponse(Response):
    """Sends ``content`` piece by piece. Closes it at once when the connection closes. A client that
    takes no data is disconnected by ``connections.py``."""

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._content = content
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._content):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for piece in self._content:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
