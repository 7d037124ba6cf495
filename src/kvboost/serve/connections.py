"""Connections: how many there may be, and how long a client may keep one waiting."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost.serve.settings import ServerSettings

HEAD_BYTES = 4 * 1024
"""Bytes read at a time of heads and of chunked bodies. The parser handles all of them before other
connections are served, and a body in chunks of one byte has thousands of parts."""
BODY_BYTES = 64 * 1024
"""Bytes read at a time of other bodies, which are not parsed."""


class NetworkState(Protocol):
    """What an application on the network keeps as ``app.state.server``."""

    settings: ServerSettings
    waiting_connections: dict[H11Protocol, None]
    """Connections without a request, the one that has waited longest first."""
    draining: bool


class FramedConnection(h11.Connection):
    """h11's connection with a shorter way for the parts of a body of unknown length: they change no
    state, so all they need is a frame."""

    _is_chunked = False

    def send(self, event: Any) -> Any:
        if self._is_chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # 0 bytes would end it
        sent = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class Connection(H11Protocol):
    """uvicorn's connection with three more limits. A request's head must be complete within
    ``head_seconds``. A client that does not take data for ``write_seconds`` is disconnected. When
    there are ``max_connections``, a new one replaces the connection that has waited longest
    without a request; if all of them have one, the new connection is closed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        head_bytes = self.config.h11_max_incomplete_event_size
        assert head_bytes is not None
        self.conn = FramedConnection(h11.SERVER, head_bytes)
        self._state: NetworkState = self.config.app.state.server  # type: ignore[union-attr]
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = HEAD_BYTES  # type: ignore[attr-defined]
        waiting = self._state.waiting_connections
        waiting[self] = None
        if len(self.connections) > self._state.settings.max_connections:
            oldest = next(iter(waiting))  # this one, if all others have a request
            del waiting[oldest]
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers or ())
        size = BODY_BYTES if self._has_request and not chunked else HEAD_BYTES
        self.transport.max_size = size  # type: ignore[attr-defined]
        if self._has_request:
            self._cancel_head_timer()
            self._state.waiting_connections.pop(self, None)
        else:
            self._expect_head()

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
