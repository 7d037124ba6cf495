"""``/tokenize``, ``/detokenize`` and ``/version``, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, Tag
from starlette.responses import JSONResponse, Response

import kvboost
from kvboost.serve.bodies import BodyRoute
from kvboost.serve.chat import chat_prompt
from kvboost.serve.openapi import errors
from kvboost.serve.prompts import encode
from kvboost.serve.request_fields import (
    MAX_TOKEN_IDS,
    Body,
    SomeText,
    Text,
    TokenId,
    has,
    one_of,
    some,
)
from kvboost.serve.request_models import ChatRequest
from kvboost.serve.response_models import Detokenized, Tokenized, Version
from kvboost.serve.server import Caller, Server

router = APIRouter(route_class=BodyRoute, tags=["tokens"])


class TokenizeText(Body):
    """A text whose tokens are to be listed."""

    model: Text | None = None
    prompt: SomeText
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatRequest):
    """A conversation whose tokens are to be listed, as a chat request has it."""

    model: Text | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


def _kind(body: object) -> str | None:
    has_messages = isinstance(body, TokenizeChat) or has(body, "messages")
    has_prompt = isinstance(body, TokenizeText) or has(body, "prompt")
    return None if has_messages == has_prompt else "a chat" if has_messages else "a text"


TokenizeRequest = Annotated[
    Annotated[TokenizeChat, Tag("a chat")] | Annotated[TokenizeText, Tag("a text")],
    one_of(_kind, "an object with either 'prompt' or 'messages'"),
]


class DetokenizeRequest(Body):
    """Tokens whose text is wanted."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], some(MAX_TOKEN_IDS, least=0)] = Field(default_factory=list)


@router.post("/tokenize", response_model=Tokenized, responses=errors(404, 413))
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
        texts = [engine.decode([one]) for one in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": engine.context_length,
            "tokens": ids,
            "token_strs": texts,
        }

    return JSONResponse(
        await server.workers.tokenize(caller.counts_as, request.state.body_size, work)
    )


@router.post("/detokenize", response_model=Detokenized, responses=errors(404))
async def detokenize(body: DetokenizeRequest, server: Server, caller: Caller) -> Response:
    """The text of tokens."""
    if body.model is not None:
        server.check_model(body.model)
    server.check_token_ids(body.tokens, "tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(server.engine.decode, body.tokens)})


@router.get("/version", response_model=Version, responses=errors(has_body=False))
async def version() -> Response:
    """The version of the server."""
    return JSONResponse({"version": kvboost.__version__})
