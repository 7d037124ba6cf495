"""Responses that are sent piece by piece, to clients that may close their connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.serve.errors import ClientGone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_ANY_TEXT = "\0any text\0"

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Its text, with no blanks in between."""


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {_json(value)}\n\n".encode()


def line(value: Mapping[str, Any]) -> bytes:
    """One line of NDJSON."""
    return f"{_json(value)}\n".encode()


class TextEvents:
    """Events that differ in one text: everything else is encoded once."""

    def __init__(self, make: Callable[[str], Mapping[str, Any]]) -> None:
        """``make`` gives the value of the event with a text."""
        value = event(make(_ANY_TEXT))
        self._before, _, self._after = value.rpartition(_json(_ANY_TEXT).encode())

    def event(self, text: str) -> bytes:
        return b"".join((self._before, _json(text).encode(), self._after))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. If the client closes its connection first, cancels ``work``, waits
    until it has ended and raises ClientGone. The request's body must have been read."""
    task, closed = asyncio.ensure_future(work), asyncio.ensure_future(_closed(receive))
    try:
        await asyncio.wait([task, closed], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        closed.cancel()
        await asyncio.gather(task, closed, return_exceptions=True)


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


async def _closed(receive: Receive) -> None:
    """Ends when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
