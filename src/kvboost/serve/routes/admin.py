"""``/kvboost/...``: what an operator can see and do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

import kvboost
from kvboost.results import Pin
from kvboost.serve.answers.prompts import encode, refuse_long_text
from kvboost.serve.answers.reports import counts, spans
from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError, from_engine, shutting_down
from kvboost.serve.explanations import with_documents
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import EACH_ONCE, Router, errors
from kvboost.serve.http.problems import shown
from kvboost.serve.http.streaming import LiveResponse, line, unless_gone
from kvboost.serve.routes.chat import chat_call
from kvboost.serve.routes.completions import completion_call
from kvboost.serve.schema import own, replies
from kvboost.serve.server import Caller, Server, ServerState

router = Router(prefix="/kvboost", tags=["admin"], route_class=BodyRoute)

_QUEUE = ("waiting", "running", "max_waiting", "max_running", "kv_bytes", "max_kv_bytes")


@router.post(
    "/warm",
    response_class=Response,
    responses={
        200: {
            "description": "One line per document: done, total, new_chunks. With several contexts "
            "a last one: done, total, readings_waiting. An error ends it",
            "content": {"application/x-ndjson": {}},
        },
        **errors(404, 413, 429),
    },
)
async def warm(body: own.WarmRequest, request: Request, server: Server, caller: Caller) -> Response:
    """Reads documents into the cache, one after the other, while other requests run. The response
    begins after the first document, so a mistake that concerns all of them is an error. With
    several ``contexts``, a last line says how many readings wait for idle time."""
    salt = _owner(server, caller, body.tenant).salt(body.cache_salt)
    engine, total = server.engine, len(body.documents)

    async def read(number: int) -> bytes:
        document = body.documents[number]
        await _refuse_long(server, caller, body.header or "", document)
        new = await engine.awarm(document, body.header, cache_salt=salt)
        return line({"done": number + 1, "total": total, "new_chunks": new})

    first = await unless_gone(request.receive, read(0))

    async def leave_the_rest() -> bytes:
        later = partial(engine.warm_later, contexts=body.contexts, cache_salt=salt)
        size = body.contexts * sum(map(len, body.documents))
        waiting = 0
        if total > 1:
            waiting = await server.workers.tokenize(
                caller.counts_as, size, later, body.documents, body.header
            )
        return line({"done": total, "total": total, "readings_waiting": waiting})

    async def progress() -> AsyncGenerator[bytes, None]:
        yield first
        for number in range(1, total + (body.contexts > 1)):
            try:
                yield await (read(number) if number < total else leave_the_rest())
                continue
            except asyncio.CancelledError:
                if not server.draining:  # the client is gone
                    raise
                failure = shutting_down()
            except (ApiError, kvboost.KVBoostError) as error:
                failure = from_engine(error)
            yield line({"done": number, "total": total, **failure.body()})
            return

    return LiveResponse(progress(), "application/x-ndjson")


@router.endpoint("POST /plan", replies.PlanReply, 404, 413)
async def plan(body: own.PlanRequest, request: Request, server: Server, caller: Caller) -> Response:
    """How a chat or completion request would be served now. Runs nothing."""
    if body.model is not None:
        server.check_model(body.model)
    engine, documents = server.engine, server.documents.texts_of(caller.owner)
    other_salts = not server.settings.needs_key  # with keys, they may be another tenant's

    def work() -> dict[str, Any]:
        if isinstance(body, own.ChatPlan):
            call = chat_call(server, caller, body)
        else:
            call = completion_call(server, caller, body)
        options = {
            name: call.options[name]
            for name in ("recompute_strategy", "recompute_ratio", "reuse_moved", "adapter")
            if name in call.options
        }
        ids = encode(engine, call.prompts[0])
        found = engine.plan(ids, call.mode, cache_salt=call.place.salt, **options)
        explained = found.explain(other_salts=other_salts)
        return {
            "mode": call.mode,
            "strategy": server.strategy(options.get("recompute_strategy")),
            "prompt_tokens": len(ids),
            **counts(found),
            "estimated_ms_without_reuse": engine.estimate_ms(len(ids)),
            "notes": list(found.notes),
            "spans": spans(found, ids, engine.decode),
            "explanation": with_documents(explained, documents).as_dict(),
        }

    return JSONResponse(
        await server.workers.tokenize(caller.counts_as, request.state.body_size, work)
    )


@router.endpoint("GET /cache", replies.CacheReply, 400, dependencies=[EACH_ONCE])
async def cache(
    server: Server,
    limit: Annotated[int, Query(ge=1, le=1000, description="Number of chunks to list.")] = 20,
) -> Response:
    """The statistics of the cache and the queue, and the most valuable chunks with the beginning of
    their text."""
    engine = server.engine

    def work() -> dict[str, Any]:
        return {
            "stats": engine.cache_stats(),
            "serving": engine.serving_stats(),
            "chunks": engine.chunks(limit),
        }

    return JSONResponse(await asyncio.to_thread(work))


@router.endpoint("POST /forget", replies.Forgotten, 404)
async def forget(body: own.ForgetRequest, server: Server, caller: Caller) -> Response:
    """Forgets a text of any tenant, or everything under one salt; on every tier. No earlier answer
    can be explained afterwards: their prompts may hold the text."""
    engine = server.engine
    server.explanations.clear()
    if isinstance(body, own.ForgetText):
        gone = await server.workers.tokenize(
            caller.counts_as, len(body.text), engine.forget, body.text
        )
    else:
        salt = _owner(server, caller, body.tenant).salt(body.cache_salt)
        gone = await asyncio.to_thread(engine.forget_salt, salt)
    return JSONResponse({"forgotten": gone})


@router.endpoint("POST /pins", Pin, 404, 409, 413, 429)
async def pin(body: own.PinRequest, request: Request, server: Server, caller: Caller) -> Response:
    """Reads a text unless it is cached, and keeps it from being evicted. To pin it again renews
    it."""
    place = _owner(server, caller, body.tenant).place(body.cache_salt)
    engine, header = server.engine, None
    prompt: str | list[int]
    match body:
        case own.PinText():
            prompt, header = body.text, body.header
        case own.PinDocument():
            prompt = server.documents.get(place, body.document_id).text
        case own.PinIds():
            prompt = body.token_ids
    if isinstance(prompt, str):
        await _refuse_long(server, caller, header or "", prompt)
    reading = engine.apin(prompt, header, ttl=body.ttl, cache_salt=place.salt)
    return JSONResponse(asdict(await unless_gone(request.receive, reading)))


@router.endpoint("GET /pins", replies.PinList)
async def list_pins(server: Server) -> Response:
    """All pins, those of sessions included, in the order in which they end."""
    engine = server.engine
    pins = await asyncio.to_thread(engine.pins)
    stats = await asyncio.to_thread(engine.cache_stats)
    sizes = {"bytes": stats["pinned_bytes"], "max_bytes": stats["max_pinned_bytes"]}
    return JSONResponse({"object": "list", "data": [asdict(one) for one in pins], **sizes})


@router.endpoint("DELETE /pins/{name}", Pin, 404)
async def unpin(name: str, server: Server) -> Response:
    """Ends a pin. What it held stays in the cache until it is evicted."""
    found = await asyncio.to_thread(server.engine.drop_pin, name)
    if found is None:
        raise ApiError(404, f"there is no pin {shown(name)}", "pin_not_found", "name")
    return JSONResponse(asdict(found))


@router.endpoint("GET /live", replies.LiveReply, 400, dependencies=[EACH_ONCE])
async def live(
    server: Server,
    since: Annotated[int, Query(ge=0, lt=2**63, description="The last seq that was seen.")] = 0,
) -> Response:
    """The data of the page: the last answers in numbers, what became of their approximate rows, the
    tiers and the queue."""
    engine = server.engine
    stats = await asyncio.to_thread(engine.cache_stats)
    queue = engine.serving_stats()
    now = time.time()
    return JSONResponse(
        {
            "seq": server.live.seq,
            "now": now,
            "uptime_s": now - server.started,
            "model": server.names[0],
            "context_length": engine.context_length,
            "needs_key": server.settings.needs_key,
            "version": kvboost.__version__,
            "facts": server.facts,
            "requests": server.live.since(since),
            "reading": [
                {**one, "estimated_ms_without_reuse": engine.estimate_ms(one["prompt_tokens"])}
                for one in server.live.reading()
            ],
            "healed_requests": server.live.healed(),
            "healing": stats["healing"],
            "audit": stats["audit"],
            "tiers": stats["tiers"],
            "queue": {name: queue[name] for name in _QUEUE},
        }
    )


async def _refuse_long(server: ServerState, caller: Tenant, *texts: str) -> None:
    """Raises ApiError if ``texts`` together do not fit the context for certain."""
    if (limit := server.engine.context_length) is not None:
        await server.workers.tokenize(
            caller.counts_as, len(texts[-1]), refuse_long_text, server.engine, texts, limit
        )


def _owner(server: ServerState, caller: Tenant, tenant: str | None) -> Tenant:
    """The caller, or the tenant that an administrator names."""
    return caller if tenant is None else server.keys.named(tenant)
