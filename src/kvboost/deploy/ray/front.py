"""The front: reads a request's body, which Serve's own router never sees, and hands it on."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvboost.deploy.answers import farewell
from kvboost.deploy.content import NOTHING, Sketch
from kvboost.deploy.requests import request_sketch
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import receive_body
from kvboost.serve.http.workers import Workers
from kvboost.serve.settings import ServerSettings

logger = logging.getLogger("kvboost.route")

ATTEMPTS = 3
"""Replicas that are tried before the client is told to come back."""
GONE = (RayActorError, DeploymentUnavailableError, BackPressureError)
_SCOPE = ("method", "path", "raw_path", "query_string", "headers", "http_version", "scheme")


class Front:
    """Stateless; any number of them may run."""

    def __init__(self, replicas: Any, *, shared_cache: bool) -> None:
        self._replicas = replicas.options(stream=True)
        self._shared_cache = shared_cache
        self._limits = ServerSettings()
        self._workers = Workers()

    async def __call__(self, request: Request) -> Response:
        try:
            body = await receive_body(request, self._limits)
            sketch = await self._sketch(request, body)
            return await self._answer(sketch, _scope(request), body)
        except ApiError as error:
            return error.response()

    async def _sketch(self, request: Request, body: bytes) -> Sketch:
        if request.method != "POST":
            return NOTHING
        return await self._workers.parse(
            "", len(body), request_sketch, request.headers, body, self._shared_cache
        )

    async def _answer(self, sketch: Sketch, scope: Mapping[str, Any], body: bytes) -> Response:
        """The answer of the first replica that begins one."""
        for _ in range(ATTEMPTS):
            messages = self._replicas.asgi.remote(sketch, dict(scope), body)
            try:
                start = await messages.__anext__()
            except GONE as error:
                logger.warning("a replica was lost before it answered: %s", type(error).__name__)
                continue
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            return StreamingResponse(_rest(messages, headers), start["status"], headers)
        said = "no replica can take this request now; try again"
        raise ApiError(503, said, "no_upstream", retry_after=2)


async def _rest(messages: Any, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    """The pieces of an answer. One that its replica does not finish ends with an error event, or
    with a connection that closes too early."""
    last = b""
    try:
        async for message in messages:
            if piece := message.get("body"):
                last = (last + piece)[-2:]
                yield piece
    except GONE as error:
        logger.warning("a replica was lost while it answered: %s", type(error).__name__)
        parting = farewell(headers.get("content-type", ""), last)
        if parting is None:
            raise
        yield parting
    finally:
        messages.cancel()


def _scope(request: Request) -> dict[str, Any]:
    """The facts of a request that the application needs, in types that can be sent."""
    scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
    scope["headers"] = [(bytes(name), bytes(value)) for name, value in request.scope["headers"]]
    client = request.client
    return {
        **scope,
        "client": (client.host, client.port) if client else None,
        "server": None,
        "root_path": "",
    }
