"""``/tokenize``, ``/detokenize`` and ``/version``, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

import kvboost
from kvboost.serve.answers.prompts import encode
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.routes.chat import chat_prompt
from kvboost.serve.schema import replies
from kvboost.serve.schema.own import DetokenizeRequest, TokenizeChat, TokenizeRequest
from kvboost.serve.server import Caller, Server

router = Router(route_class=BodyRoute, tags=["tokens"])


@router.endpoint("POST /tokenize", replies.Tokenized, 404, 413)
async def tokenize(
    body: TokenizeRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """The tokens of a text, or of a conversation in the model's chat template."""
    if body.model is not None:
        server.check_model(body.model)
    engine = server.engine

    def work() -> dict[str, Any]:
        if isinstance(body, TokenizeChat):
            prompt = chat_prompt(server, caller, body).conversation
            ids = encode(engine, prompt, add_special_tokens=body.add_special_tokens)
        else:
            ids = encode(engine, body.prompt, add_special_tokens=body.add_special_tokens)
        tokens: list[int] = ids.tolist()
        texts = [engine.decode([one]) for one in tokens] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": engine.context_length,
            "tokens": tokens,
            "token_strs": texts,
        }

    return JSONResponse(
        await server.workers.tokenize(caller.counts_as, request.state.body_size, work)
    )


@router.endpoint("POST /detokenize", replies.Detokenized, 404)
async def detokenize(body: DetokenizeRequest, server: Server, caller: Caller) -> Response:
    """The text of tokens."""
    if body.model is not None:
        server.check_model(body.model)
    server.check_token_ids(body.tokens, "tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(server.engine.decode, body.tokens)})


@router.endpoint("GET /version", replies.Version)
async def version() -> Response:
    """The version of the server."""
    return JSONResponse({"version": kvboost.__version__})
