"""Ollama's API: ``/api/chat``, ``/api/generate``, ``/api/embed``, and what describes the models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.answers.choices import EngineCall
from kvboost.serve.answers.responses import deliver
from kvboost.serve.auth import Tenant
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.http.streaming import unless_gone
from kvboost.serve.ollama import replies
from kvboost.serve.ollama.models import all_names, described, listed, running, served_name
from kvboost.serve.ollama.requests import (
    Asked,
    EmbedRequest,
    LegacyEmbedRequest,
    OllamaChat,
    OllamaGenerate,
    ShowRequest,
)
from kvboost.serve.ollama.writer import OllamaWriter
from kvboost.serve.routes.chat import chat_call
from kvboost.serve.routes.completions import completion_call
from kvboost.serve.routes.embeddings import check_dimensions, encode
from kvboost.serve.schema.replies import Version
from kvboost.serve.server import Caller, Server, ServerState

API_VERSION = "0.12.11"
"""The version of Ollama whose API this is. Clients refuse versions that are too old for them."""
_NDJSON = "application/x-ndjson"


class _AnyTypeRoute(BodyRoute):
    """Ollama's documentation has ``curl -d`` without a content type."""

    needs_json_type = False


router = Router(replies.OllamaErrorReply, _NDJSON, route_class=_AnyTypeRoute, tags=["ollama"])


@router.endpoint("POST /api/chat", replies.OllamaChatReply, streams=True)
async def chat(body: OllamaChat, request: Request, server: Server, caller: Caller) -> Response:
    """Answers a conversation in the model's chat template, like Ollama's API."""

    def call(model: str) -> EngineCall:
        chat = body.for_chat(model, server.engine.context_length)
        return chat_call(server, caller, chat, "format")

    writer = OllamaWriter(server, body.model, is_chat=True)
    return await _answer(request, server, body, writer, call if body.messages else None)


@router.endpoint("POST /api/generate", replies.OllamaGenerateReply, streams=True)
async def generate(
    body: OllamaGenerate, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a prompt: in the model's chat template, or with ``raw`` or ``suffix`` without it."""

    def call(model: str) -> EngineCall:
        context = server.engine.context_length
        if not body.is_completion:
            return chat_call(server, caller, body.for_chat(model, context), "format")
        limit = body.options.max_tokens(context) or server.settings.default_max_tokens
        call = completion_call(server, caller, body.for_completion(model, limit))
        return replace(call, format_field=call.format_field and "format")

    writer = OllamaWriter(server, body.model, is_chat=False)
    return await _answer(request, server, body, writer, call if body.prompt else None)


@router.endpoint("POST /api/embed", replies.EmbedReply, 404)
async def embed(body: EmbedRequest, request: Request, server: Server, caller: Caller) -> Response:
    """Embeds texts, each as a vector of length 1."""
    check_dimensions(server, body.dimensions)
    vectors, tokens = await _embed(
        request, server, body.model, body.inputs(), -1 if body.truncate else None
    )
    reply = {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": round((time.perf_counter() - request.state.received) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }
    return await asyncio.to_thread(JSONResponse, reply)


@router.endpoint("POST /api/embeddings", replies.LegacyEmbedReply, 404)
async def embed_prompt(
    body: LegacyEmbedRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Embeds one text, for older clients."""
    (vector,), _ = await _embed(request, server, body.model, [body.prompt], -1)
    return JSONResponse({"embedding": vector})


@router.endpoint("POST /api/show", replies.ShowReply, 404)
async def show(body: ShowRequest, server: Server, caller: Caller) -> Response:
    """Describes the model: what it can do, and how much text it takes."""
    return JSONResponse(await asyncio.to_thread(described, server, body.model))


@router.endpoint("GET /api/tags", replies.OllamaModels)
async def list_tags(server: Server) -> Response:
    """The names of this server's model, its adapters, and its model for embeddings."""
    return JSONResponse({"models": [listed(server, name) for name in all_names(server)]})


@router.endpoint("GET /api/ps", replies.RunningModels)
async def list_running(server: Server) -> Response:
    """The same models: all of them are loaded."""
    return JSONResponse({"models": [running(server, name) for name in all_names(server)]})


@router.endpoint("GET /api/version", Version)
async def api_version() -> Response:
    """The version of Ollama whose API this is. ``/version`` has that of KVBoost."""
    return JSONResponse({"version": API_VERSION})


async def _answer(
    request: Request,
    server: ServerState,
    body: Asked,
    writer: OllamaWriter,
    call: Callable[[str], EngineCall] | None,
) -> Response:
    """Answers what ``call`` makes of the request for a model; None: it asks nothing."""
    model = served_name(body.model, (*server.names, *server.adapter_names))
    server.check_model(model)
    if call is None:
        return JSONResponse(writer.loaded())
    caller: Tenant = request.state.tenant
    asked = await server.workers.parse(caller.counts_as, request.state.body_size, call, model)
    return await deliver(
        request, server, asked, writer, model, stream=body.stream, media_type=_NDJSON
    )


async def _embed(
    request: Request, server: ServerState, model: str, texts: Sequence[str], truncate: int | None
) -> tuple[list[list[float]], int]:
    """The vectors of ``texts``, and how many tokens they have."""
    server.check_embedding_model(served_name(model, server.embedding_names))
    if not texts:
        return [], 0
    ids = await encode(server, request.state.tenant, texts, truncate)
    vectors = await unless_gone(request.receive, server.embedder.embed(ids))
    return await asyncio.to_thread(vectors.tolist), sum(map(len, ids))
