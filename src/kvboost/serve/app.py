"""The application: its routes, and the middleware before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

import kvboost
from kvboost.errors import KVBoostError
from kvboost.serve.anthropic import routes as anthropic
from kvboost.serve.auth import AuthMiddleware
from kvboost.serve.errors import ApiError, on_engine_error, on_http_error, on_invalid, on_too_much
from kvboost.serve.http import openapi
from kvboost.serve.http.application import Application
from kvboost.serve.http.limits import EXPOSED, HeadLimits, OpenRequests
from kvboost.serve.http.middleware import RequestMiddleware
from kvboost.serve.http.openapi import Router, errors
from kvboost.serve.metrics import CONTENT_TYPE
from kvboost.serve.ollama import routes as ollama
from kvboost.serve.openai_responses import routes as openai_responses
from kvboost.serve.routes import (
    admin,
    chat,
    completions,
    documents,
    embeddings,
    explain,
    models,
    tokens,
)
from kvboost.serve.schema import replies
from kvboost.serve.server import Server, ServerState
from kvboost.serve.settings import ServerSettings

STATIC = Path(__file__).parent / "static"

router = Router()
metrics_router = APIRouter()


def create_app(engine: kvboost.KVBoost, settings: ServerSettings | None = None) -> FastAPI:
    """A server for ``engine``. When it stops, it waits for running answers and flushes the cache.
    The caller closes the engine."""
    settings = settings or ServerSettings()
    state = ServerState(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.draining = False
        state.start_images()
        await state.documents.start()
        try:
            yield
        except asyncio.CancelledError:
            return  # Ctrl-C while it stops: nothing is waited for
        state.draining = True
        await state.documents.stop()
        await state.stop_images()
        await engine.adrain(settings.drain_seconds)
        await asyncio.to_thread(engine.flush)
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.close)

    app = Application(
        title="KVBoost",
        version=kvboost.__version__,
        openapi_url=None,  # a route of ours, in a thread
        docs_url=None,  # it would load scripts from other servers
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.server = state
    modules = (
        *(chat, completions, openai_responses, anthropic, ollama, embeddings),
        *(models, tokens, admin, documents, explain),
    )
    routers = [*(module.router for module in modules), router]
    if settings.metrics != "off":
        routers.append(metrics_router)
    for one in routers:
        app.include_router(one)
    app.state.endpoints = openapi.endpoints(routers)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    for kind in (ApiError, KVBoostError):
        app.add_exception_handler(kind, on_engine_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ValidationError, on_too_much)
    # A request passes through the last one first.
    app.add_middleware(OpenRequests, settings=settings)
    app.add_middleware(AuthMiddleware, keys=state.keys, settings=settings)
    app.add_middleware(HeadLimits, settings=settings)
    if settings.cors_origins:
        # Keys are in a header, never in cookies, so pages may not send credentials.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's client for browsers sends a dozen of its own
            expose_headers=EXPOSED,
        )
    app.add_middleware(RequestMiddleware, server=state)
    openapi.install(app, state)
    return app


_HEALTH: dict[str, Any] = {
    "response_model": replies.Health,
    "responses": {**errors(has_body=False), 503: {"model": replies.Health | replies.ErrorReply}},
}


@router.get("/health", **_HEALTH)
async def health(server: Server) -> Response:
    """Whether the process is alive, and how far it is with the documents that it starts with.
    Requests are answered meanwhile. 503 if it can answer none any more and must be started
    again."""
    status = 200 if server.engine.failure is None else 503
    return JSONResponse(_hindrance(server) or {"status": "ok"}, status)


@router.get("/ready", **_HEALTH)
async def ready(server: Server) -> Response:
    """Whether a load balancer should send requests here: 200, or 503 while the server reads the
    documents that it starts with, stops, or must be started again."""
    if server.draining:
        return JSONResponse({"status": "draining"}, 503)
    hindrance = _hindrance(server)
    return JSONResponse(hindrance or {"status": "ready"}, 503 if hindrance else 200)


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **errors(has_body=False),
    },
)
async def metrics(server: Server) -> Response:
    """Metrics for Prometheus."""
    text = await asyncio.to_thread(server.metrics.text)
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/openapi.json", include_in_schema=False)
async def openapi_document(request: Request) -> Response:
    return JSONResponse(await asyncio.to_thread(request.app.openapi))


@router.head("/", include_in_schema=False)  # Ollama's clients look whether there is a server
@router.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def _hindrance(server: ServerState) -> dict[str, Any] | None:
    """Why the server is not ready; None if it is."""
    if server.engine.failure is not None:
        return {"status": "failed"}
    if (warming := server.documents.warming) is not None:
        return {"status": "warming", "warmed": warming[0], "to_warm": warming[1]}
    return None
