"""The headers of every response, one line in the log, and the response to an unexpected error."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.answers.reports import begin_record, new_id
from kvboost.serve.errors import ApiError, ClientGone, internal, log_failure, shutting_down
from kvboost.serve.server import ServerState

logger = logging.getLogger("kvboost.serve")

POLLED_PATHS = ("/kvboost/live", "/metrics", "/health", "/ready")
"""Machines ask for these every second. They and the page's files are logged as debug messages."""
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PAGE = "/static/"
_CACHING = b"cache-control"

_RESTRICTING = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
]


class RequestMiddleware:
    """Gives every request an id (its own, if it sends a valid one), every response the headers
    that restrict browsers, and the log one line with the request's tokens and times. An unexpected
    error is answered with 500; the log has the place where it happened, not its message."""

    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, record = time.perf_counter(), begin_record()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = message.get("headers", ())
                message["headers"] = [*given, *_added(given, scope["path"], request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientGone:
            pass
        except asyncio.CancelledError:  # the server stops, and drain_seconds are over
            if not status:
                await shutting_down().response()(scope, receive, send_with_headers)
        except Exception as error:
            log_failure(error, request_id, with_message=self._server.settings.log_prompts)
            if not status:
                await internal().response()(scope, receive, send_with_headers)
        finally:
            ended, tenant = time.perf_counter(), state.get("tenant")
            refusal: ApiError | None = state.get("refusal")
            said = record.line() or (refusal.line() if refusal is not None else "-")
            self._server.metrics.response(status)
            is_minor = scope["path"] in POLLED_PATHS or scope["path"].startswith(_PAGE)
            level = logging.DEBUG if is_minor else logging.INFO
            name, took = "-" if tenant is None else tenant.name, (ended - began) * 1e3
            facts = (request_id, scope["method"], scope["path"], status or "gone", took, name, said)
            logger.log(level, "%s %s %r %s %.0f ms %s %s", *facts)
            if self._server.tracing is not None and not is_minor:
                self._server.tracing.request(scope, record, status, began, ended)


def _added(
    given: Iterable[tuple[bytes, bytes]], path: str, request_id: str
) -> list[tuple[bytes, bytes]]:
    """The headers that every response gets. One that has the last of them keeps it."""
    added = [(b"x-request-id", request_id.encode()), *_RESTRICTING]
    if all(name != _CACHING for name, _ in given):
        added.append((_CACHING, b"no-cache" if path.startswith(_PAGE) else b"no-store"))
    return added


def _request_id(scope: Scope) -> str:
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _GIVEN_ID.fullmatch(given) else f"req-{new_id()}"
