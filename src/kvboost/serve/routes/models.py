"""``/v1/models``, and adapters as vLLM has them: their names are models in requests."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.errors import UnknownAdapterError
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.http.problems import shown
from kvboost.serve.schema import replies
from kvboost.serve.schema.own import LoadAdapter, UnloadAdapter
from kvboost.serve.server import Server, ServerState

router = Router(route_class=BodyRoute)


@router.endpoint("POST /v1/load_lora_adapter", replies.AdapterReply, 404, tags=["admin"])
async def load_lora_adapter(body: LoadAdapter, server: Server) -> Response:
    """Loads a LoRA adapter while requests run."""
    if body.lora_name in server.names:
        said = f"{body.lora_name!r} is the name of the model itself; choose another one"
        raise ApiError(400, said, "invalid_value", "lora_name")
    await asyncio.to_thread(
        server.engine.load_adapter, body.lora_name, body.lora_path, in_place=body.load_inplace
    )
    return JSONResponse(_described(server, body.lora_name))


@router.endpoint("POST /v1/unload_lora_adapter", replies.Unloaded, 404, tags=["admin"])
async def unload_lora_adapter(body: UnloadAdapter, server: Server) -> Response:
    """Unloads an adapter. Running requests finish with it."""
    try:
        await asyncio.to_thread(server.engine.unload_adapter, body.lora_name)
    except UnknownAdapterError:
        loaded = ", ".join(sorted(server.engine.adapters())) or "none"
        said = f"there is no adapter {shown(body.lora_name)}; loaded: {loaded}"
        raise ApiError(404, said, "model_not_found", "lora_name") from None
    return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})


_Model = replies.AdapterReply | replies.ModelReply


@router.endpoint("GET /v1/models", replies.ListOf[_Model], tags=["openai"])
async def list_models(server: Server) -> Response:
    """The names of this server's model, its adapters, and its model for embeddings."""
    names = (*server.names, *server.adapter_names, *server.embedding_names)
    data = [_described(server, name) for name in dict.fromkeys(names)]
    return JSONResponse({"object": "list", "data": data})


@router.endpoint("GET /v1/models/{model:path}", _Model, 404, tags=["openai"])
async def retrieve_model(model: str, server: Server) -> Response:
    """The model under one of its names, an adapter, or the model for embeddings."""
    if model not in server.embedding_names:
        server.check_model(model)
    return JSONResponse(_described(server, model))


def _described(server: ServerState, name: str) -> dict[str, Any]:
    """An entry of ``/v1/models``."""
    is_own = name in server.names or name in server.adapter_names
    context = server.engine.context_length if is_own else server.embedder.max_tokens
    more: dict[str, Any] = {}
    if name in server.adapter_names:
        adapter = server.engine.adapters()[name]
        more = {"parent": server.names[0], "digest": adapter.digest, "rank": adapter.rank}
    return {
        "id": name,
        "object": "model",
        "created": int(server.started),
        "owned_by": "kvboost",
        "context_length": context,
        "max_model_len": context,
        **more,
    }
