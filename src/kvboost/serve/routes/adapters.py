"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them. An adapter's name is
the ``model`` of a request."""

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

router = Router(route_class=BodyRoute, tags=["admin"])


@router.endpoint("POST /v1/load_lora_adapter", replies.AdapterReply, 404)
async def load_lora_adapter(body: LoadAdapter, server: Server) -> Response:
    """Loads a LoRA adapter while requests run."""
    if body.lora_name in server.names:
        said = f"{body.lora_name!r} is the name of the model itself; choose another one"
        raise ApiError(400, said, "invalid_value", "lora_name")
    await asyncio.to_thread(
        server.engine.load_adapter, body.lora_name, body.lora_path, in_place=body.load_inplace
    )
    return JSONResponse(describe(server, body.lora_name))


@router.endpoint("POST /v1/unload_lora_adapter", replies.Unloaded, 404)
async def unload_lora_adapter(body: UnloadAdapter, server: Server) -> Response:
    """Unloads an adapter. Running requests finish with it."""
    try:
        await asyncio.to_thread(server.engine.unload_adapter, body.lora_name)
    except UnknownAdapterError:
        loaded = ", ".join(sorted(server.engine.adapters())) or "none"
        said = f"there is no adapter {shown(body.lora_name)}; loaded: {loaded}"
        raise ApiError(404, said, "model_not_found", "lora_name") from None
    return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})


def describe(server: ServerState, name: str) -> dict[str, Any]:
    """An adapter as an entry of ``/v1/models``."""
    server.check_model(name)
    adapter = server.engine.adapters()[name]
    return {
        "id": name,
        "object": "model",
        "created": int(server.started),
        "owned_by": "kvboost",
        "context_length": server.engine.context_length,
        "max_model_len": server.engine.context_length,
        "parent": server.names[0],
        "digest": adapter.digest,
        "rank": adapter.rank,
    }
