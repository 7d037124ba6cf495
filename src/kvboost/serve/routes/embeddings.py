"""``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from fastapi import Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.http.streaming import unless_gone
from kvboost.serve.schema.embeddings import EmbeddingList, EmbeddingRequest, Ranking, RerankRequest
from kvboost.serve.server import Caller, Server, ServerState

router = Router(route_class=BodyRoute, tags=["openai"])


@router.endpoint("POST /v1/embeddings", EmbeddingList, 404)
async def create_embeddings(
    body: EmbeddingRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Embeds texts: the mean of the last hidden states, of length 1, like OpenAI's API."""
    server.check_embedding_model(body.model)
    check_dimensions(server, body.dimensions)
    ids = await encode(server, caller, body.inputs(), body.truncate_prompt_tokens)
    vectors = await unless_gone(request.receive, server.embedder.embed(ids))
    as_text = body.encoding_format == "base64"

    def write() -> Response:
        data = []
        for index, row in enumerate(vectors):
            vector = b64encode(row.astype("<f4")).decode() if as_text else row.tolist()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        return JSONResponse(
            {"object": "list", "data": data, "model": body.model, "usage": _usage(ids)}
        )

    return await asyncio.to_thread(write)


@router.endpoint("POST /v1/rerank", Ranking, 404)
async def rerank(body: RerankRequest, request: Request, server: Server, caller: Caller) -> Response:
    """Sorts documents by how close their embeddings are to that of the query (cosine)."""
    server.check_embedding_model(body.model)
    ids = await encode(server, caller, [body.query, *body.documents], body.truncate_prompt_tokens)
    vectors = await unless_gone(request.receive, server.embedder.embed(ids))
    scores = vectors[1:] @ vectors[0]
    results = []
    for index in np.argsort(-scores, kind="stable")[: body.top_n].tolist():
        found: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents:
            found["document"] = {"text": body.documents[index]}
        results.append(found)
    head = {"id": f"rerank-{uuid4().hex}", "model": body.model}
    return JSONResponse({**head, "results": results, "usage": _usage(ids)})


def check_dimensions(server: ServerState, asked: int | None) -> None:
    """Raises ApiError 400 unless the vectors have as many dimensions as a request asks for."""
    own = server.embedder.dimensions
    if asked not in (None, own):
        said = f"dimensions={asked} is not supported: this model's vectors have {own}"
        raise ApiError(400, f"{said} and cannot be shortened", "invalid_value", "dimensions")


async def encode(
    server: ServerState,
    caller: Tenant,
    inputs: Sequence[str] | Sequence[list[int]],
    truncate: int | None,
) -> list[list[int]]:
    """The token ids of ``inputs``, in a thread if there is much of them. Raises ApiError 400 if the
    model cannot embed one. ``truncate``: so many tokens of each are read; -1: as many as it takes.
    """
    embedder = server.embedder

    def work() -> list[list[int]]:
        most = None
        if truncate is not None:
            most = embedder.max_tokens if truncate < 0 else max(1, truncate)
        ids = [
            embedder.encode(one, most) if isinstance(one, str) else embedder.truncate(one, most)
            for one in inputs
        ]
        embedder.check(ids)
        return ids

    return await server.workers.tokenize(caller.counts_as, sum(map(len, inputs)), work)


def _usage(ids: Sequence[Sequence[int]]) -> dict[str, int]:
    count = sum(map(len, ids))
    return {"prompt_tokens": count, "total_tokens": count}
