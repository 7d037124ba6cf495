"""``/v1/responses``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

from kvboost.errors import ContextLengthError
from kvboost.serve.answers.choices import EngineCall
from kvboost.serve.answers.prompts import encode
from kvboost.serve.answers.responses import deliver
from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import EACH_ONCE, Router
from kvboost.serve.openai_responses import replies
from kvboost.serve.openai_responses.items import input_items
from kvboost.serve.openai_responses.requests import ResponseRequest
from kvboost.serve.openai_responses.store import StoredResponse
from kvboost.serve.openai_responses.writer import ResponseWriter
from kvboost.serve.routes.chat import chat_call, chat_prompt
from kvboost.serve.schema.chat import Message
from kvboost.serve.schema.fields import MAX_MESSAGES
from kvboost.serve.server import Caller, Server, ServerState

router = Router(route_class=BodyRoute, tags=["openai"])


@router.endpoint("POST /v1/responses", replies.ResponseReply, streams=True)
async def create_response(
    body: ResponseRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a conversation, or continues one that is kept here, like OpenAI's API."""
    workers, size, kept, known = server.workers, request.state.body_size, None, 0
    if (previous := body.previous_response_id) is not None:
        kept = server.stored_responses.get(caller.owner, previous, "previous_response_id")
        known = sum(one.size for one in kept.messages)
        size += kept.size
    messages = await workers.parse(caller.counts_as, size, _conversation, body, kept)
    asked = messages
    if body.truncation == "auto":
        asked = await workers.tokenize(
            caller.counts_as, size, _fitting, server, caller, body, messages
        )

    def make() -> EngineCall:
        return chat_call(server, caller, body.for_chat(asked), "text.format")

    call = await workers.parse(caller.counts_as, size, make)
    call = replace(call, size=call.size + known)
    writer = ResponseWriter(server, caller.owner, body, messages)
    return await deliver(request, server, call, writer, body.model, stream=bool(body.stream))


def _conversation(body: ResponseRequest, kept: StoredResponse | None) -> list[Message]:
    """The messages of a request, after those of the response that it continues."""
    messages = [*(kept.messages if kept is not None else ()), *body.new_messages()]
    if len(messages) >= MAX_MESSAGES:
        most = f"at most {MAX_MESSAGES - 1:,} are allowed"
        said = f"the conversation has {len(messages):,} messages; {most}"
        raise ApiError(400, said, "invalid_value", "input")
    return messages


def _fitting(
    server: ServerState, caller: Tenant, body: ResponseRequest, messages: list[Message]
) -> list[Message]:
    """``messages`` without as many of the oldest as do not fit the context. What is left begins
    with a message of the user's."""
    starts = [0, *(n for n, one in enumerate(messages) if n and one.role == "user")]

    def fits(start: int) -> bool:
        prompt = chat_prompt(server, caller, body.for_chat(messages[start:])).conversation
        try:
            encode(server.engine, prompt)
        except (ContextLengthError, ApiError):
            return False
        return True

    first = bisect_left(starts, True, hi=len(starts) - 1, key=fits)
    return messages[starts[first] :]


@router.endpoint("GET /v1/responses/{response_id}", replies.ResponseReply, 400, 404)
async def retrieve_response(
    response_id: str, request: Request, server: Server, caller: Caller
) -> Response:
    """A response that is kept. It cannot be streamed again."""
    for name in request.query_params:
        said = f"{name[:80]} is not a parameter that this server knows"
        raise ApiError(400, said, "unknown_field", name)
    return JSONResponse(server.stored_responses.get(caller.owner, response_id).response)


@router.endpoint(
    "GET /v1/responses/{response_id}/input_items",
    replies.ItemList,
    400,
    404,
    dependencies=[EACH_ONCE],
)
async def list_input_items(
    response_id: str,
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=100, description="Items to list.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="The oldest first, or last.")] = (
        "desc"
    ),
    after: Annotated[str, Query(max_length=512, description="The item before the first.")] = "",
) -> Response:
    """The conversation before a response that is kept, as items."""
    stored = server.stored_responses.get(caller.owner, response_id)
    items = input_items(stored.messages[: stored.num_input])
    items = items if order == "asc" else items[::-1]
    ids = [one["id"] for one in items]
    if after and after not in ids:
        raise ApiError(404, f"there is no item {after[:80]!r}", "item_not_found", "after")
    items = items[ids.index(after) + 1 :] if after else items
    shown = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > limit,
        }
    )


@router.endpoint("DELETE /v1/responses/{response_id}", replies.DeletedResponse, 404)
async def delete_response(response_id: str, server: Server, caller: Caller) -> Response:
    """Deletes a response that is kept, with its conversation. Its text may stay cached."""
    server.stored_responses.remove(caller.owner, response_id)
    server.kept_kv.release(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})
