"""Connections to upstreams: HTTP/1.1, kept open between requests, strict about answers.

httpx's own connections keep what follows the end of an answer and take it for the answer to the
next request, which may be another user's. They wait as long as 1xx answers come, and they read
nothing while they send. These do not.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import anyio
import h11
import httpx

CONNECT_SECONDS = 5.0
WRITE_SECONDS = 30.0
IDLE_SECONDS = 4.0
"""Shorter than servers keep idle connections, so that none is used while it closes: uvicorn 5 s."""
MAX_IDLE = 64
"""Connections to one upstream that wait for a request."""
MAX_HEAD = 64 * 1024
"""Bytes of an answer's head."""
MAX_INTERIM = 16
"""1xx answers before the answer."""
READ_AHEAD = 64 * 1024
"""Bytes of an answer that are read before the client has taken those before them."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SAID = {
    "Receive buffer too long": f"a head or a line of more than {MAX_HEAD:,} bytes",
    "_SWITCH_UPGRADE": "a switch to another protocol (101)",
}
"""Errors of h11, in words of users."""


class Connections(httpx.AsyncBaseTransport):
    """Sends requests; as in httpx, the extension ``target`` is sent in place of the URL's path. An
    answer that is not valid HTTP raises httpx.RemoteProtocolError; one that is not finished raises
    httpx.ReadError."""

    def __init__(
        self, silent_seconds: float | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """``silent_seconds``: the time for the head of an answer, and between two parts of its
        body; None sets no limit. ``tls``: for https; by default, public authorities are trusted."""
        self._silent_seconds = silent_seconds
        self._idle: dict[tuple[str, str, int | None], list[_Connection]] = {}
        self._tls = tls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        idle = self._idle.setdefault((url.scheme, url.host, url.port), [])
        connection = _resumed(idle) or await self._connect(url)
        try:
            head = await connection.ask(request, self._silent_seconds)
        except BaseException:
            connection.close()
            raise
        body = _Body(connection, idle, self._silent_seconds)
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=body)

    async def fetch(
        self, request: httpx.Request, seconds: float, most: int
    ) -> tuple[httpx.Response, bytes | None]:
        """An answer and its body, within ``seconds``; None for one of more than ``most`` bytes."""
        try:
            with anyio.fail_after(seconds):
                response = await self.handle_async_request(request)
                try:
                    body, is_whole = await read_up_to(most, response.aiter_raw())
                    return response, body if is_whole else None
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} s") from None

    async def aclose(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    async def _connect(self, url: httpx.URL) -> _Connection:
        is_tls = url.scheme == "https"
        if is_tls and self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection,
                    url.host,
                    url.port or (443 if is_tls else 80),
                    ssl=self._tls if is_tls else None,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection


async def read_up_to(most: int, pieces: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """A body as it was sent, and whether that is all of it. Reading stops as soon as there are more
    than ``most`` bytes; ``pieces`` then has the others."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > most:
            return bytes(body), False
    return bytes(body), True


@dataclass
class _Body(httpx.AsyncByteStream):
    """The body of an answer. Closing it keeps its connection for another request, if possible."""

    _connection: _Connection
    _idle: list[_Connection]
    _silent_seconds: float | None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._connection.pieces(self._silent_seconds):
            yield piece

    async def aclose(self) -> None:
        if len(self._idle) < MAX_IDLE and self._connection.rest():
            self._idle.append(self._connection)
        else:
            self._connection.close()


def _resumed(idle: list[_Connection]) -> _Connection | None:
    """The connection that was used last and is still open."""
    while idle:
        connection = idle.pop()
        if connection.resume():
            return connection
    return None


class _Connection(asyncio.Protocol):
    """One connection. It always reads, so an answer that comes before the request is sent, or an
    end, is noticed at once."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = h11.Connection(h11.CLIENT, MAX_HEAD)
        self._has_length = False
        """Whether the answer gives its length."""
        self._unread = 0
        """Bytes that arrived since the last wait for more."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self._error: Exception | None = None
        """The error that ended the connection, unless the upstream closed it."""
        self._parser_knows_end = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    async def ask(self, request: httpx.Request, seconds: float | None) -> h11.Response:
        """Sends a request; returns the head of the answer, which must come within ``seconds``."""
        try:
            target = request.extensions.get("target", request.url.raw_path)
            method, headers = request.method.encode(), request.headers.raw
            parts = [
                self._parser.send(h11.Request(method=method, target=target, headers=headers)),
                self._parser.send(h11.Data(request.content)) if request.content else b"",
                self._parser.send(h11.EndOfMessage()),
            ]
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from None
        self._transport.writelines(parts)
        deadline = None if seconds is None else self._loop.time() + seconds
        for _ in range(MAX_INTERIM + 1):
            event = await self._event(deadline)
            if type(event) is h11.Response:
                self._has_length = _check_head(event, request.method)
                return event
        raise httpx.RemoteProtocolError(f"more than {MAX_INTERIM} interim responses (1xx)")

    async def pieces(self, seconds: float | None) -> AsyncGenerator[bytes, None]:
        """The body, as it comes, with at most ``seconds`` between two pieces. The last piece comes
        only if nothing follows the body's announced end."""
        arrived: list[bytes] = []
        while True:
            event = self._next_event()
            if type(event) is h11.Data:
                arrived.append(bytes(event.data))
            elif event is not h11.NEED_DATA:
                break
            elif arrived:
                yield b"".join(arrived)
                arrived.clear()
            else:
                await self._more(None if seconds is None else self._loop.time() + seconds)
        if self._has_length and self._has_surplus:
            raise httpx.RemoteProtocolError("the body is longer than its Content-Length")
        if arrived:
            yield b"".join(arrived)

    def rest(self) -> bool:
        """Makes the connection ready for another request. False if it cannot take one."""
        parser = self._parser
        is_done = (parser.our_state, parser.their_state) == (h11.DONE, h11.DONE)
        if self._is_over or not is_done or self._has_surplus:
            return False
        if self._transport.get_write_buffer_size():  # the answer came before the request was sent
            return False
        parser.start_next_cycle()
        self._idle_timer = self._loop.call_later(IDLE_SECONDS, self.close)
        self._transport.resume_reading()
        return True

    def resume(self) -> bool:
        """Ends the rest. False if the connection is closed."""
        self._cancel_idle_timer()
        return not self._is_over and not self._transport.is_closing()

    def close(self) -> None:
        self._cancel_idle_timer()
        self._transport.abort()

    def _cancel_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    @property
    def _has_surplus(self) -> bool:
        """Whether data follows the end of the answer."""
        return bool(self._parser.trailing_data[0])

    async def _event(self, deadline: float | None) -> Any:
        while (event := self._next_event()) is h11.NEED_DATA:
            await self._more(deadline)
        return event

    def _next_event(self) -> Any:
        """The events that h11 makes of the data that is there."""
        try:
            return self._parser.next_event()
        except h11.RemoteProtocolError as error:
            kind = httpx.ReadError if self._parser_knows_end else httpx.RemoteProtocolError
            told = str(error)
            raise kind(next((_SAID[part] for part in _SAID if part in told), told)) from None

    async def _more(self, deadline: float | None) -> None:
        """Waits for more data, or for the end of the stream."""
        if self._is_over:
            if self._error is not None:
                raise self._error
            self._parser.receive_data(b"")
            self._parser_knows_end = True
            return
        self._unread = 0
        self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        late = httpx.ReadTimeout("the upstream sent nothing in time")
        timer = None if deadline is None else self._loop.call_at(deadline, self._end, late)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _end(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._idle_timer is not None:  # nothing was asked
            self.close()
            return
        self._parser.receive_data(data)
        self._unread += len(data)
        if self._unread > READ_AHEAD:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None if exc is None else httpx.ReadError(str(exc)))
        self._cancel_idle_timer()
        self.resume_writing()

    def pause_writing(self) -> None:
        late = httpx.WriteTimeout(f"the upstream did not take the request in {WRITE_SECONDS:g} s")
        self._write_timer = self._loop.call_later(WRITE_SECONDS, self._end, late)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _check_head(head: h11.Response, method: str) -> bool:
    """Whether the answer has a body of a length that it gives. Raises httpx.RemoteProtocolError if
    its head contradicts itself; h11 has checked the rest."""
    names = {name for name, _ in head.headers}
    if _CONTROL.search(b"".join(value for _, value in head.headers)):
        raise httpx.RemoteProtocolError("a control character in a header")
    if {b"content-length", b"transfer-encoding"} <= names:
        raise httpx.RemoteProtocolError("both a Content-Length and a Transfer-Encoding")
    if head.status_code > 599:
        raise httpx.RemoteProtocolError(f"status {head.status_code}, which does not exist")
    has_body = method != "HEAD" and head.status_code not in (204, 304)
    return has_body and b"content-length" in names
