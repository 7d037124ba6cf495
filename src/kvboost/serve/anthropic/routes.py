"""``/v1/messages``."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.anthropic.marks import find_kept
from kvboost.serve.anthropic.reply_models import AnthropicErrorReply, MessageReply, TokenCount
from kvboost.serve.anthropic.request_models import CountTokensRequest, MessagesRequest
from kvboost.serve.anthropic.writer import MessageWriter
from kvboost.serve.bodies import BodyRoute
from kvboost.serve.chat import chat_call, chat_prompt
from kvboost.serve.openapi import errors, streamed
from kvboost.serve.prompts import encode, num_characters
from kvboost.serve.responses import deliver
from kvboost.serve.server import Caller, Server

router = APIRouter(route_class=BodyRoute, tags=["anthropic"])


@router.post(
    "/v1/messages",
    response_model=MessageReply,
    responses={
        **streamed("text/event-stream"),
        **errors(404, 413, 429, 503, 504, model=AnthropicErrorReply),
    },
)
async def create_message(
    body: MessagesRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a conversation in the model's chat template, like Anthropic's API."""
    server.check_model(body.model)
    chat = body.for_chat()
    call = chat_call(server, caller, chat)
    if call.format_field is not None:
        call = replace(call, format_field="output_config.format")
    kept = await find_kept(server, chat_prompt(server, caller, chat), body.marks())
    writer = MessageWriter(server, body, kept, request.state.request_id)
    return await deliver(request, server, call, writer, body.model, stream=bool(body.stream))


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=errors(404, model=AnthropicErrorReply),
)
async def count_tokens(body: CountTokensRequest, server: Server, caller: Caller) -> Response:
    """Counts the tokens of a prompt, without an answer."""
    server.check_model(body.model)
    prompt = chat_prompt(server, caller, body.for_chat())
    size = num_characters(prompt)
    ids = await server.workers.tokenize(size, encode, server.engine, prompt)
    return JSONResponse({"input_tokens": len(ids)})
