"""``kvboost route``: one address for several servers.

A request's body is read, routed by its content and sent on; the answer is streamed back as it
comes. Headers, keys and statuses pass through unchanged. A request whose upstream fails is sent to
another one, as long as nothing of the answer has reached the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from kvboost.deploy.forward import Forward
from kvboost.deploy.requests import FORWARDED, is_plain, not_plain
from kvboost.deploy.state import ProxySettings, RouteState
from kvboost.serve.errors import ApiError
from kvboost.serve.http.limits import HeadLimits, OpenRequests
from kvboost.serve.metrics import CONTENT_TYPE

ABOUT = (
    "this is a router: it forwards /v1/... and /api/..., and answers /health, /ready and /metrics. "
    "Ask each server itself for its page and for /kvboost/..., which concern that server alone"
)


def create_router(settings: ProxySettings) -> Starlette:
    """The router as an application. Its upstreams need not be there yet."""
    state = RouteState(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await state.upstreams.check()
        watching = asyncio.create_task(state.upstreams.watch())
        try:
            yield
        finally:
            state.draining = True
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await state.connections.aclose()

    app = Starlette(
        routes=[
            Route("/", _about),  # Ollama's clients send HEAD to look whether there is a server
            Route("/health", _health),
            Route("/ready", _ready),
            *([Route("/metrics", _metrics)] if settings.limits.metrics != "off" else []),
            *(Mount(path.decode().rstrip("/"), Forward(state)) for path in FORWARDED),
        ],
        middleware=[
            Middleware(HeadLimits, settings=settings.limits),
            Middleware(OpenRequests, settings=settings.limits),
        ],
        exception_handlers={HTTPException: _not_here},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


async def _about(request: Request) -> Response:
    return PlainTextResponse(f"{ABOUT}.\n")


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    """Whether a request would find an upstream, and the state of each."""
    state: RouteState = request.app.state.server
    upstreams = state.upstreams.states
    if state.draining or not state.upstreams.usable:
        status = "draining" if state.draining else "no upstream"
        return JSONResponse({"status": status, "upstreams": upstreams}, 503)
    return JSONResponse({"status": "ready", "upstreams": upstreams})


async def _metrics(request: Request) -> Response:
    state: RouteState = request.app.state.server
    return Response(state.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    raw: bytes = request.scope["raw_path"]
    if not is_plain(raw):
        return not_plain(raw).response()
    return ApiError(error.status_code, ABOUT, headers=error.headers).response()
