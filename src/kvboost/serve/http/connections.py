"""Connections: how many there may be, and how long a client may keep one waiting."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvboost.serve.settings import ServerSettings

MAX_HEAD = 64 * 1024
"""Bytes after which an incomplete head is refused. ``max_header_bytes`` limits complete ones."""


class NetworkState(Protocol):
    """The state that an application on the network keeps as ``app.state.server``."""

    settings: ServerSettings
    waiting_connections: dict[asyncio.Protocol, None]
    """Connections without a request, the one that has waited longest first."""
    draining: bool


class Connection(HttpToolsProtocol):
    """uvicorn's connection with four more limits.

    - A request's head must be complete within ``head_seconds`` and ``MAX_HEAD`` bytes.
    - A client that does not take data for ``write_seconds`` is disconnected.
    - When there are ``max_connections``, a new one replaces the connection that has waited longest
      without a request; if all of them have one, the new connection is closed.
    - A client waits for its answer before it sends the next request. If it does not, it gets the
      first answer and the connection is closed: otherwise connections full of requests that take no
      time would never be without one, and no new connection could replace them.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._state: NetworkState = self.config.app.state.server  # type: ignore[union-attr]
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_size = 0
        self._in_body = False
        """Whether the body of a request is still arriving, answered or not."""
        self._is_pipelined = False
        """Whether the client has sent a request before the answer to another one was complete."""

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answered(self) -> bool:
        """Whether the client has all of the answer, although the application has not ended it."""
        cycle = self.cycle
        return cycle.chunked_encoding is False and cycle.expected_content_length == 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        waiting = self._state.waiting_connections
        waiting[self] = None
        if len(self.connections) > self._state.settings.max_connections:
            oldest = next(iter(waiting))  # this one, if all others have a request
            assert isinstance(oldest, Connection)
            del waiting[oldest]
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._is_pipelined:
            return
        super().data_received(data)
        self._head_size = 0 if self._has_request or self._in_body else self._head_size + len(data)
        if self._has_request:
            self._cancel_head_timer()
            self._state.waiting_connections.pop(self, None)
        elif self._head_size > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        else:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_body = True
        if self._has_request and not self._is_answered:
            self._is_pipelined, self.cycle.keep_alive = True, False
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_pipelined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self._is_pipelined:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may start the next request of this connection
        if self.transport.is_closing():
            self._limit_writing()
        if not self._has_request:
            self._state.waiting_connections[self] = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._state.waiting_connections.pop(self, None)
        self._cancel_head_timer()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _expect_head(self) -> None:
        """Limits the time to the next complete head. More of a head does not extend it."""
        seconds = self._state.settings.head_seconds
        if self._head_timer is None and seconds:
            self._head_timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _limit_writing(self) -> None:
        """Limits the time for what is still to be sent. Closing a transport alone would wait for
        a client that reads nothing."""
        seconds = self._state.settings.write_seconds
        if self._write_timer is None and seconds:
            self._write_timer = self.loop.call_later(seconds, self.transport.abort)
