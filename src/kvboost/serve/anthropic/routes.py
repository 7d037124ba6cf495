"""``/v1/messages``."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.answers.choices import EngineCall
from kvboost.serve.answers.prompts import encode
from kvboost.serve.answers.responses import deliver
from kvboost.serve.anthropic import replies
from kvboost.serve.anthropic.requests import CountTokensRequest, MessagesRequest
from kvboost.serve.anthropic.writer import MessageWriter
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.routes.chat import chat_call, chat_prompt, conversation_call
from kvboost.serve.server import Caller, Server

router = Router(replies.AnthropicErrorReply, route_class=BodyRoute, tags=["anthropic"])


@router.endpoint("POST /v1/messages", replies.MessageReply, streams=True)
async def create_message(
    body: MessagesRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a conversation in the model's chat template, like Anthropic's API."""
    server.check_model(body.model)

    def make() -> EngineCall:
        return chat_call(server, caller, body.for_chat(), "output_config.format")

    call = await conversation_call(request, server, caller, make, body)
    writer = MessageWriter(server, body, request.state.request_id)
    return await deliver(request, server, call, writer, body.model, stream=bool(body.stream))


@router.endpoint("POST /v1/messages/count_tokens", replies.TokenCount, 404)
async def count_tokens(
    body: CountTokensRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Counts the tokens of a prompt, after the edits of ``context_management``."""
    server.check_model(body.model)

    def count() -> dict[str, Any]:
        prompt = chat_prompt(server, caller, body.for_chat())
        tokens = len(encode(server.engine, prompt.conversation))
        if prompt.applied_edits is None:
            return {"input_tokens": tokens}
        before = tokens + sum(edit.cleared_input_tokens for edit in prompt.applied_edits)
        return {"input_tokens": tokens, "context_management": {"original_input_tokens": before}}

    return JSONResponse(
        await server.workers.tokenize(caller.counts_as, request.state.body_size, count)
    )
