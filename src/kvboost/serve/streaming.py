"""Answers that are sent as they are made, to clients that may hang up or fall asleep."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.serve.errors import ClientGone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_json(value)}\n\n".encode()


def line(value: Mapping[str, Any]) -> bytes:
    """One line of NDJSON."""
    return f"{_json(value)}\n".encode()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. If the client hangs up first, ``work`` is cancelled, has ended by the
    time ClientGone is raised, and has freed what it held. The request's body must have been
    read."""
    return await _first(work, _hang_up(receive))


class LiveResponse(Response):
    """Sends ``content`` piece by piece. Ends it at once when the client hangs up, or takes
    nothing for ``write_seconds``: ``content`` is closed either way."""

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        media_type: str,
        write_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._content = content
        self._write_seconds = write_seconds
        self._sending_since: float | None = None
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._content):
            await _first(self._send(send), _hang_up(receive), self._fall_asleep())

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self._timed(send, {"type": "http.response.start", **start})
        async for piece in self._content:
            body = {"type": "http.response.body", "body": piece, "more_body": True}
            await self._timed(send, body)
        await self._timed(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _timed(self, send: Send, message: dict[str, Any]) -> None:
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    async def _fall_asleep(self) -> None:
        """Ends when one piece has been on its way for too long. One look now and then is cheaper
        than a timer per piece."""
        while True:
            await asyncio.sleep(max(0.05, self._write_seconds / 4))
            since = self._sending_since
            if since is not None and time.monotonic() - since > self._write_seconds:
                return


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """What ``work`` gives, or ClientGone as soon as one of ``others`` ends before it."""
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, *watchers):
            one.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)
