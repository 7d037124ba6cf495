"""``/v1/responses``."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.bodies import BodyRoute
from kvboost.serve.chat import chat_call
from kvboost.serve.errors import ApiError
from kvboost.serve.openai_responses.reply_models import DeletedResponse, ResponseReply
from kvboost.serve.openai_responses.request_models import ResponseRequest
from kvboost.serve.openai_responses.writer import ResponseWriter
from kvboost.serve.openapi import errors, streamed
from kvboost.serve.request_fields import MAX_MESSAGES
from kvboost.serve.responses import deliver
from kvboost.serve.server import Caller, Server

router = APIRouter(route_class=BodyRoute, tags=["openai"])


@router.post(
    "/v1/responses",
    response_model=ResponseReply,
    responses={**streamed("text/event-stream"), **errors(404, 413, 429, 503, 504)},
)
async def create_response(
    body: ResponseRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a conversation, or continues one that is kept here, like OpenAI's API."""
    messages = body.new_messages()
    if (previous := body.previous_response_id) is not None:
        kept = server.stored_responses.get(caller.name, previous, "previous_response_id")
        messages = [*kept.messages, *messages]
    if len(messages) >= MAX_MESSAGES:
        raise ApiError(
            400,
            f"the conversation has {len(messages):,} messages; at most {MAX_MESSAGES - 1:,} are "
            "allowed",
            code="invalid_value",
            param="input",
        )
    call = chat_call(server, caller, body.for_chat(messages))
    if call.format_field is not None:
        call = replace(call, format_field="text.format")
    writer = ResponseWriter(server, caller.name, body, messages)
    return await deliver(request, server, call, writer, body.model, stream=bool(body.stream))


@router.get(
    "/v1/responses/{response_id}",
    response_model=ResponseReply,
    responses=errors(400, 404, has_body=False),
)
async def retrieve_response(
    response_id: str, request: Request, server: Server, caller: Caller
) -> Response:
    """A response that is kept. It cannot be streamed again."""
    for name in request.query_params:
        raise ApiError(
            400,
            f"{name[:80]} is not a parameter that this server knows",
            code="unknown_field",
            param=name,
        )
    return JSONResponse(server.stored_responses.get(caller.name, response_id).response)


@router.delete(
    "/v1/responses/{response_id}",
    response_model=DeletedResponse,
    responses=errors(404, has_body=False),
)
async def delete_response(response_id: str, server: Server, caller: Caller) -> Response:
    """Deletes a response that is kept, with its conversation. Its text may stay cached."""
    server.stored_responses.remove(caller.name, response_id)
    server.kept_kv.release(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})
