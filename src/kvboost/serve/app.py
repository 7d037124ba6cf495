"""The application: routes, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

import kvboost
from kvboost.errors import KVBoostError
from kvboost.serve import admin, chat, completions, openapi
from kvboost.serve.auth import AuthMiddleware
from kvboost.serve.envelope import RequestMiddleware
from kvboost.serve.errors import ApiError, on_engine_error, on_http_error, on_invalid
from kvboost.serve.limits import BodyLimits, RequestLimits
from kvboost.serve.metrics import CONTENT_TYPE
from kvboost.serve.openapi import errors
from kvboost.serve.response_models import ErrorReply, Health, ModelList, ModelReply
from kvboost.serve.server import ServerState
from kvboost.serve.settings import ServerSettings

if TYPE_CHECKING:
    from kvboost import KVBoost

STATIC = Path(__file__).parent / "static"

router = APIRouter()


def create_app(engine: KVBoost, settings: ServerSettings | None = None) -> FastAPI:
    """A server for ``engine``, which stays the caller's to close. When the server stops, running
    answers are waited for and the cache is flushed."""
    settings = settings or ServerSettings()
    serving = ServerState(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        serving.draining = False
        yield
        serving.draining = True
        await engine.adrain(settings.drain_seconds)
        await asyncio.to_thread(engine.flush)

    app = FastAPI(
        title="KVBoost",
        version=kvboost.__version__,
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.serving = serving
    for module in (chat, completions, admin):
        app.include_router(module.router)
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    for kind in (ApiError, KVBoostError):
        app.add_exception_handler(kind, on_engine_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    # The last one added is the first a request meets.
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(AuthMiddleware, keys=serving.keys)
    app.add_middleware(RequestLimits, settings=settings)
    app.add_middleware(RequestMiddleware, settings=settings, metrics=serving.metrics)
    openapi.install(app, serving)
    return app


@router.get(
    "/v1/models", response_model=ModelList, responses=errors(has_body=False), tags=["openai"]
)
async def list_models(request: Request) -> Response:
    """The names this server's model goes by."""
    serving: ServerState = request.app.state.serving
    data = [_model(serving, name) for name in serving.names]
    return JSONResponse({"object": "list", "data": data})


@router.get(
    "/v1/models/{model:path}",
    response_model=ModelReply,
    responses=errors(404, has_body=False),
    tags=["openai"],
)
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    serving: ServerState = request.app.state.serving
    serving.check_model(model)
    return JSONResponse(_model(serving, model))


@router.get("/health", response_model=Health, responses=errors(has_body=False))
async def health() -> Response:
    """Whether the process is alive."""
    return JSONResponse({"status": "ok"})


@router.get(
    "/ready",
    response_model=Health,
    responses={**errors(has_body=False), 503: {"model": Health | ErrorReply}},
)
async def ready(request: Request) -> Response:
    """Whether requests are taken: 200, or 503 while the server stops."""
    serving: ServerState = request.app.state.serving
    if serving.draining:
        return JSONResponse({"status": "draining"}, 503)
    return JSONResponse({"status": "ready"})


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **errors(has_body=False),
    },
)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    serving: ServerState = request.app.state.serving
    text = await asyncio.to_thread(serving.metrics.text)
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def _model(serving: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(serving.started),
        "owned_by": "kvboost",
        "context_length": serving.engine.context_length,
    }
