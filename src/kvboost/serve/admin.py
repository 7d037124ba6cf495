"""``/kvboost/...``: what an operator may look at and do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

import kvboost
from kvboost.serve.auth import Tenant
from kvboost.serve.chat import chat_ask
from kvboost.serve.completions import completion_ask
from kvboost.serve.errors import from_engine
from kvboost.serve.openapi import errors
from kvboost.serve.request_models import (
    ChatPlan,
    ForgetRequest,
    ForgetText,
    PlanRequest,
    WarmRequest,
)
from kvboost.serve.response_models import CacheReply, Forgotten, LiveReply, PlanReply
from kvboost.serve.reuse_report import counts, spans
from kvboost.serve.server import ServerState
from kvboost.serve.streaming import LiveResponse, line, unless_gone

router = APIRouter(prefix="/kvboost", tags=["admin"])

_QUEUE = ("waiting", "running", "max_waiting", "max_running", "kv_bytes", "max_kv_bytes")


@router.post(
    "/warm",
    response_class=Response,
    responses={
        200: {
            "description": "One line per document: done, total, new_chunks; or error, and the end",
            "content": {"application/x-ndjson": {}},
        },
        **errors(404, 413, 429),
    },
)
async def warm(body: WarmRequest, request: Request) -> Response:
    """Reads documents ahead, one after the other, beside whatever else runs. The first is read
    before the answer begins, so what is wrong with all of them is an error."""
    serving, salt = _serving(request), _salt(request, body.tenant, body.cache_salt)
    engine, total = serving.engine, len(body.documents)

    async def read(number: int) -> bytes:
        new = await engine.awarm(body.documents[number], body.header, cache_salt=salt)
        return line({"done": number + 1, "total": total, "new_chunks": new})

    first = await unless_gone(request.receive, read(0))

    async def progress() -> AsyncGenerator[bytes, None]:
        yield first
        for number in range(1, total):
            try:
                yield await read(number)
            except kvboost.KVBoostError as error:
                yield line({"done": number, "total": total, **from_engine(error).body()})
                return

    return LiveResponse(progress(), "application/x-ndjson", serving.settings.write_seconds)


@router.post("/plan", response_model=PlanReply, responses=errors(404, 413))
async def plan(body: PlanRequest, request: Request) -> Response:
    """How a chat or completion request would be served now. Runs nothing."""
    serving, tenant = _serving(request), request.state.tenant
    if body.model is not None:
        serving.check_model(body.model)
    if isinstance(body, ChatPlan):
        ask = chat_ask(serving, tenant, body)
    else:
        ask = completion_ask(serving, tenant, body)
    engine = serving.engine
    options = {
        name: ask.options[name]
        for name in ("recompute_strategy", "recompute_ratio")
        if name in ask.options
    }

    def work() -> dict[str, Any]:
        ids = engine.encode(ask.prompts[0])
        found = engine.plan(ids, ask.mode, cache_salt=ask.salt, **options)
        return {
            "mode": ask.mode,
            "strategy": serving.strategy(options.get("recompute_strategy")),
            "prompt_tokens": len(ids),
            **counts(found),
            "estimated_ms_without_reuse": engine.estimate_ms(len(ids)),
            "notes": list(found.notes),
            "spans": spans(found, ids, engine.decode),
        }

    return JSONResponse(await asyncio.to_thread(work))


@router.get("/cache", response_model=CacheReply, responses=errors(400, has_body=False))
async def cache(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description="Chunks to list.")] = 20,
) -> Response:
    """What the cache holds and has done, and its most valuable chunks with how they begin."""
    engine = _serving(request).engine

    def work() -> dict[str, Any]:
        return {
            "stats": engine.cache_stats(),
            "serving": engine.serving_stats(),
            "chunks": engine.chunks(limit),
        }

    return JSONResponse(await asyncio.to_thread(work))


@router.post("/forget", response_model=Forgotten, responses=errors(404))
async def forget(body: ForgetRequest, request: Request) -> Response:
    """Forgets a text, whoever read it, or everything under one salt; on every tier."""
    engine = _serving(request).engine
    if isinstance(body, ForgetText):
        gone = await asyncio.to_thread(engine.forget, body.text)
    else:
        salt = _salt(request, body.tenant, body.cache_salt)
        gone = await asyncio.to_thread(engine.forget_salt, salt)
    return JSONResponse({"forgotten": gone})


@router.get("/live", response_model=LiveReply, responses=errors(400, has_body=False))
async def live(
    request: Request,
    since: Annotated[int, Query(ge=0, lt=2**63, description="What was seen already.")] = 0,
) -> Response:
    """What the page draws: the last answers in numbers, the tiers and the queue."""
    serving = _serving(request)
    engine = serving.engine
    stats = await asyncio.to_thread(engine.cache_stats)
    queue = engine.serving_stats()
    now = time.time()
    return JSONResponse(
        {
            "seq": serving.live.seq,
            "now": now,
            "uptime_s": now - serving.started,
            "model": serving.names[0],
            "context_length": engine.context_length,
            "needs_key": serving.settings.needs_key,
            "version": kvboost.__version__,
            "requests": serving.live.since(since),
            "tiers": stats["tiers"],
            "queue": {name: queue[name] for name in _QUEUE},
        }
    )


def _serving(request: Request) -> ServerState:
    serving: ServerState = request.app.state.serving
    return serving


def _salt(request: Request, tenant: str | None, cache_salt: str) -> str:
    """The salt of the caller, or of the tenant an administrator names."""
    caller: Tenant = request.state.tenant
    whose = caller if tenant is None else _serving(request).keys.named(tenant)
    return whose.salt(cache_salt)
