"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them. An adapter's name is
the ``model`` of a request."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response

from kvboost.errors import UnknownAdapterError
from kvboost.results import LONGEST_ADAPTER_NAME
from kvboost.serve.bodies import BodyRoute
from kvboost.serve.errors import ApiError
from kvboost.serve.openapi import errors
from kvboost.serve.problems import shown
from kvboost.serve.request_fields import Body, SomeText
from kvboost.serve.response_models import AdapterReply, Unloaded
from kvboost.serve.server import Server, ServerState

router = APIRouter(route_class=BodyRoute)

AdapterName = Annotated[SomeText, Field(max_length=LONGEST_ADAPTER_NAME)]


class LoadAdapter(Body):
    """An adapter to load. The path is one of the server's machine."""

    lora_name: AdapterName
    lora_path: SomeText
    load_inplace: bool = False
    """Whether to replace the adapter of that name. Running requests finish with the old one."""


class UnloadAdapter(Body):
    """An adapter to unload."""

    lora_name: AdapterName


@router.post(
    "/v1/load_lora_adapter",
    response_model=AdapterReply,
    responses=errors(404),
    tags=["admin"],
)
async def load_lora_adapter(body: LoadAdapter, server: Server) -> Response:
    """Loads a LoRA adapter while requests run."""
    if body.lora_name in server.names:
        raise ApiError(
            400,
            f"{body.lora_name!r} is the name of the model itself; choose another one",
            code="invalid_value",
            param="lora_name",
        )
    await asyncio.to_thread(
        server.engine.load_adapter, body.lora_name, body.lora_path, in_place=body.load_inplace
    )
    return JSONResponse(describe(server, body.lora_name))


@router.post(
    "/v1/unload_lora_adapter", response_model=Unloaded, responses=errors(404), tags=["admin"]
)
async def unload_lora_adapter(body: UnloadAdapter, server: Server) -> Response:
    """Unloads an adapter. Running requests finish with it."""
    try:
        await asyncio.to_thread(server.engine.unload_adapter, body.lora_name)
    except UnknownAdapterError:
        loaded = ", ".join(sorted(server.engine.adapters())) or "none"
        raise ApiError(
            404,
            f"there is no adapter {shown(body.lora_name)}; loaded: {loaded}",
            code="model_not_found",
            param="lora_name",
        ) from None
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
