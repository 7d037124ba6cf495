"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvboost.serve.answers import Choice, EngineCall
from kvboost.serve.auth import Tenant
from kvboost.serve.bodies import BodyRoute
from kvboost.serve.logprobs import ShownToken, chat_logprobs
from kvboost.serve.openapi import errors, streamed
from kvboost.serve.request_models import ChatRequest
from kvboost.serve.response_models import ChatCompletion
from kvboost.serve.responses import engine_call, respond, response_options
from kvboost.serve.server import Caller, Server, ServerState

router = APIRouter(route_class=BodyRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**streamed("text/event-stream"), **errors(404, 413, 429, 503, 504)},
    tags=["openai"],
)
async def create_chat_completion(
    body: ChatRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a conversation in the model's chat template, like OpenAI's API."""
    call = chat_call(server, caller, body)
    return await respond(request, server, call, ChatFormat(), response_options(body))


def chat_call(server: ServerState, caller: Tenant, body: ChatRequest) -> EngineCall:
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    return engine_call(
        server,
        caller,
        body,
        [[message.for_template() for message in body.messages]],
        min(limits, default=None),
        (body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatFormat:
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: Choice) -> dict[str, Any]:
        return _chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        return _chunk(choice, {"content": text}, choice.tokens_of(text))

    def closing(self, choice: Choice) -> dict[str, Any]:
        return {**_chunk(choice, {}), "finish_reason": choice.result.finish_reason}

    def whole(self, choice: Choice) -> dict[str, Any]:
        result = choice.result
        tokens = choice.tokens_of(result.output_text)
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": result.output_text, "refusal": None},
            "logprobs": None if tokens is None else chat_logprobs(tokens),
            "finish_reason": result.finish_reason,
        }


def _chunk(
    choice: Choice, delta: dict[str, Any], tokens: list[ShownToken] | None = None
) -> dict[str, Any]:
    return {
        "index": choice.index,
        "delta": delta,
        "logprobs": None if tokens is None else chat_logprobs(tokens),
        "finish_reason": None,
    }
