"""Request bodies: read within their limits, parsed and checked without holding up the event loop.

A body is refused at the first thing that is wrong with it: its size while it is read, its number of
JSON values before any of them is made, and then its first wrong field.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, ClassVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response
from starlette.types import Receive

from kvboost.errors import ShuttingDownError
from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError, ClientGone, invalid_body
from kvboost.serve.http.json_text import JsonTextError, parse_json
from kvboost.serve.http.streaming import unless_gone, within
from kvboost.serve.schema.fields import BodyContext
from kvboost.serve.server import ServerState
from kvboost.serve.settings import ServerSettings

_DISCARD_SECONDS = 2.0
_DISCARD_BYTES = 64 * 1024**2


class BodyRoute(APIRoute):
    """A route whose body, the parameter ``body``, is read and checked here. Its other parameters
    are ``request``, ``server`` and ``caller``, so nothing is left for FastAPI to find out. A route
    without a body is FastAPI's, and never waits for one. Notes when the body was complete
    (``request.state.received``, of ``time.perf_counter``)."""

    needs_json_type: ClassVar[bool] = True
    """Whether the headers must say that the body is JSON. It is read as JSON in any case."""

    @property
    def has_body(self) -> bool:
        return "body" in self.endpoint.__annotations__

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.handler if self.has_body else super().get_route_handler()

    @cached_property
    def handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Reads the body and calls the endpoint."""
        hints = get_type_hints(self.endpoint, include_extras=True)
        answer, wanted = self.endpoint, hints.keys() - {"return"}
        assert wanted <= {"body", "request", "server", "caller"}, wanted
        adapter: TypeAdapter[Any] = TypeAdapter(hints["body"])

        async def read_and_answer(request: Request) -> Response:
            server: ServerState = request.app.state.server
            body = await read(request, server.settings, needs_json_type=self.needs_json_type)
            request.state.received = time.perf_counter()
            request.state.body_size = len(body)
            caller: Tenant = request.state.tenant
            checked, context = await _checked(request, server, caller, adapter, body)
            request.state.ignored = context.ignored
            server.metrics.ignored_fields(len(context.ignored))
            given = {"body": checked, "request": request, "server": server, "caller": caller}
            response: Response = await answer(**{name: given[name] for name in wanted})
            return response

        return read_and_answer


async def _checked(
    request: Request, server: ServerState, caller: Tenant, adapter: TypeAdapter[Any], body: bytes
) -> tuple[Any, BodyContext]:
    """The checked model of a body, and what the check found out. Images that the body names by
    address are fetched once all else is right, the name of the model too. Then the body is checked
    again, and gets the images in place of their addresses."""
    engine, hosts, size = server.engine, server.image_hosts, len(body)
    limits = None if isinstance(engine.image_reader, str) else engine.config.image_limits
    fresh = partial(
        BodyContext,
        server.settings.strict_fields,
        max_images=None if limits is None else limits.max_images,
        image_hosts=hosts,
    )
    context = fresh()
    checked = await server.workers.parse(caller.counts_as, size, parse, adapter, body, context)
    if not context.to_fetch:
        return checked, context
    if checked.model is not None:
        server.check_model(checked.model)
    assert hosts is not None and limits is not None
    if (images := server.images) is None:
        raise ShuttingDownError("the server is stopping and fetches no images any more")
    fetched = await unless_gone(
        request.receive,
        images.fetch(
            context.to_fetch,
            hosts,
            most=limits.max_bytes,
            together=server.settings.max_body_bytes,
            tenant=caller.counts_as,
            request_id=request.state.request_id,
        ),
    )
    size += sum(len(fetched[url].data) * count for url, count in context.to_fetch.items())
    request.state.body_size = size
    context = fresh(fetched=fetched)
    checked = await server.workers.parse(caller.counts_as, size, parse, adapter, body, context)
    return checked, context


async def read(
    request: Request, settings: ServerSettings, *, needs_json_type: bool = True
) -> bytes:
    """The whole body. Raises ApiError if it is too large, too slow, or not JSON by its headers,
    unless these need not say it."""
    body = await receive_body(request, settings)
    if not body:
        raise ApiError(400, "the request has no body; send JSON", "invalid_json")
    kind = request.headers.get("content-type", "")
    if needs_json_type and not _is_json(kind):
        said = f"the body must be JSON, not {kind[:80]!r}: send 'Content-Type: application/json'"
        raise ApiError(415, said, "not_json")
    return body


async def receive_body(request: Request, settings: ServerSettings) -> bytes:
    """The whole body, of any kind, or none. Raises ApiError if it is too large or too slow."""
    try:
        return await within(settings.body_seconds, _receive(request, settings))
    except TimeoutError:
        said = f"the body did not arrive within {settings.body_seconds:g} s"
        raise ApiError(408, said, "body_timeout", headers={"connection": "close"}) from None


async def _receive(request: Request, settings: ServerSettings) -> bytes:
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()) or len(declared) > 18:
        raise ApiError(400, f"content-length must be a number, not {declared[:80]!r}")
    if int(declared) > settings.max_body_bytes:
        raise await _too_large(int(declared), settings, request.receive)
    body = bytearray()
    more = bool(int(declared)) or "transfer-encoding" in request.headers
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > settings.max_body_bytes:
            raise await _too_large(None, settings, request.receive if more else None)
    return bytes(body)


async def _too_large(
    size: int | None, settings: ServerSettings, receive: Receive | None
) -> ApiError:
    """Reads on for a moment and discards it: a client that is still sending would see its
    connection break instead of the answer."""
    if receive is not None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), _DISCARD_SECONDS)
    has = "more" if size is None else f"{size:,} bytes"
    said = f"the body has {has}; at most {settings.max_body_bytes:,} bytes are allowed"
    return ApiError(413, said, "body_too_large", headers={"connection": "close"})


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


def parse(adapter: TypeAdapter[Any], body: bytes, context: BodyContext | None = None) -> Any:
    """The checked model of a JSON body. Raises ApiError that names the first wrong field."""
    context = context or BodyContext()
    try:
        context.budget.take_body(body)
    except JsonTextError as error:
        raise ApiError(400, f"the body: {error}", "too_many_values") from None
    try:
        value = parse_json(body)
    except JsonTextError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    try:
        return adapter.validate_python(value, context=context)
    except ValidationError as error:
        raise invalid_body(error, value) from None
