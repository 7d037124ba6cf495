"""What a request may weigh, before anything is made of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.errors import ApiError, ClientGone
from kvboost.serve.settings import ServerSettings

_DISCARD_SECONDS = 2.0
_DISCARD_BYTES = 64 * 1024**2


class RequestLimits:
    """How many requests are open at once, how large their headers are, and what they call us."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error := self._refusal(scope)) is not None:
            await error.response()(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        settings = self._settings
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > settings.max_header_bytes:
            return ApiError(
                431,
                f"the headers have {size:,} bytes; at most {settings.max_header_bytes:,} are taken",
                code="headers_too_large",
            )
        if settings.allowed_hosts:
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if _host_name(host) not in settings.allowed_hosts:
                return ApiError(
                    403,
                    "this server is not called by that name; start it with --allow-host to add it",
                    kind="permission_error",
                    code="host_not_allowed",
                )
        if self._open >= settings.max_requests:
            return ApiError(
                503,
                f"{self._open} requests are open, and more are not taken",
                kind="server_error",
                code="too_many_requests_open",
                headers={"retry-after": "1"},
            )
        return None


class BodyLimits:
    """Reads a request's whole body before the application sees any of it: within its bytes,
    however they are sent, within its time, and JSON. Notes when it was there
    (``request.state.received``, of ``time.perf_counter``)."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(
                self._read(scope, receive), self._settings.body_seconds or None
            )
        except ClientGone:
            return
        except asyncio.TimeoutError:
            error = ApiError(
                408,
                f"the body did not come within {self._settings.body_seconds:g} s",
                kind="timeout_error",
                code="body_timeout",
                headers={"connection": "close"},
            )
            await error.response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["received"] = time.perf_counter()
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18:
            raise ApiError(400, "content-length is not a number")
        if int(declared) > self._settings.max_body_bytes:
            raise await self._too_large(int(declared), receive)
        if not int(declared) and b"transfer-encoding" not in headers:
            return b""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._settings.max_body_bytes:
                raise await self._too_large(None, receive if more else None)
        if body and not _is_json(headers.get(b"content-type", b"").decode("latin-1")):
            raise ApiError(
                415, "the body must be JSON: send 'Content-Type: application/json'", code="not_json"
            )
        return bytes(body)

    async def _too_large(self, size: int | None, receive: Receive | None) -> ApiError:
        """What follows is thrown away for a moment: a client that is still sending would see
        its connection break instead of the answer."""
        if receive is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_discard(receive), _DISCARD_SECONDS)
        has = "more" if size is None else f"{size:,} bytes"
        return ApiError(
            413,
            f"the body has {has}; at most {self._settings.max_body_bytes:,} bytes are taken",
            code="body_too_large",
            headers={"connection": "close"},
        )


async def _discard(receive: Receive) -> None:
    seen = 0
    while seen < _DISCARD_BYTES:
        message = await receive()
        seen += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _host_name(host: str) -> str:
    """A ``Host`` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower()
