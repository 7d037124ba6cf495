"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import uuid4

from fastapi import Request
from starlette.responses import Response

from kvboost.chat.calls import Part
from kvboost.chat.context_edits import edit_context
from kvboost.chat.parser import collect
from kvboost.results import AppliedEdit, ToolCall
from kvboost.serve.answers.choices import Choice, EngineCall
from kvboost.serve.answers.logprobs import ShownToken, chat_logprobs
from kvboost.serve.answers.prompts import (
    encode,
    find_kept,
    refuse_long_text,
    refuse_many_documents,
    texts_of,
)
from kvboost.serve.answers.responses import ChoicesWriter, engine_call, respond
from kvboost.serve.anthropic.requests import CountTokensRequest
from kvboost.serve.auth import Tenant
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.schema import replies
from kvboost.serve.schema.requests import ChatRequest
from kvboost.serve.server import Caller, Server, ServerState
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.prompt import Conversation, Prompt, has_images

router = Router(route_class=BodyRoute, tags=["openai"])

_DAY = 24 * 3600.0
_MAX_CONTEXTS = 16
"""A conversation to edit may have so many times the tokens of the context."""


@router.endpoint("POST /v1/chat/completions", replies.ChatCompletion, streams=True)
async def create_chat_completion(
    body: ChatRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Answers a conversation in the model's chat template, like OpenAI's API."""
    call = await conversation_call(
        request, server, caller, partial(chat_call, server, caller, body), body
    )
    return await respond(request, server, call, ChatWriter(server, call))


async def conversation_call(
    request: Request,
    server: ServerState,
    caller: Tenant,
    make: Callable[[], EngineCall],
    body: ChatRequest | CountTokensRequest,
) -> EngineCall:
    """The call that ``make`` makes, in a thread if it is large, with the beginnings that ``body``
    marks to be kept."""
    size = request.state.body_size
    work = server.workers.parse if body.context_management is None else server.workers.tokenize
    call = await work(caller.counts_as, size, make)

    def tokenize(prompt: Prompt) -> Awaitable[TokenIds]:
        return server.workers.tokenize(caller.counts_as, size, encode, server.engine, prompt)

    return replace(call, kept=await find_kept(call.prompts, body.marks(), tokenize))


def chat_call(
    server: ServerState, caller: Tenant, body: ChatRequest, format_field: str | None = None
) -> EngineCall:
    """The call of the engine that a chat request asks for. Call it in a thread if the request is
    large. ``format_field`` is the field that asks for a format in another API."""
    prompt = chat_prompt(server, caller, body)
    call = engine_call(server, caller, body, [prompt.conversation])
    field = call.format_field and (format_field or call.format_field)
    call = _retained(server, call, body, prompt.conversation)
    if field is not None and body.use.is_forced:
        call = replace(call, notes=[*call.notes, f"{field} has no effect: the answer is a call"])
    return replace(
        call,
        format_field=field,
        documents=prompt.documents,
        size=sum(map(len, prompt.documents)),
        applied_edits=prompt.applied_edits,
    )


def _retained(
    server: ServerState, call: EngineCall, body: ChatRequest, conversation: Conversation
) -> EngineCall:
    """``call``, with a session if the request wants its conversation to be kept for a day. The
    conversation is identified by ``prompt_cache_key`` and the user's first message."""
    if body.prompt_cache_retention != "24h":
        return call
    seconds = min(_DAY, server.settings.retention_seconds)
    if seconds < _DAY:
        most = f"a conversation for at most {seconds:g} s" if seconds else "no conversations"
        call = replace(call, notes=[f"prompt_cache_retention: this server keeps {most}"])
    if not seconds:
        return call
    first = next((one["content"] for one in conversation.messages if one["role"] == "user"), "")
    told = f"{body.prompt_cache_key or ''}\0{first}".encode()
    session = call.session or f"kept-{blake2b(told, digest_size=16).hexdigest()}"
    ttl = seconds if call.session_ttl is None else call.session_ttl
    return replace(call, session=session, session_ttl=ttl)


class ChatPrompt(NamedTuple):
    """The prompt of a chat request."""

    conversation: Conversation
    documents: list[str]
    """The texts of the documents in it."""
    applied_edits: tuple[AppliedEdit, ...] | None
    """The edits that changed it; None if the request asks for none."""


def chat_prompt(server: ServerState, caller: Tenant, body: ChatRequest) -> ChatPrompt:
    """The conversation of a request, after its edits. Raises ApiError, before any text is joined,
    if its documents are too large. Edits count tokens, which is work for a thread."""
    place, find = caller.place(body.cache_salt), server.documents.get
    parts = [part for message in body.messages for part in message.documents]
    found = [find(place, part.document_id) for part in parts]
    refuse_many_documents(server.engine, found, server.settings.max_body_bytes)
    documents = [one.under(part.title) for one, part in zip(found, parts, strict=True)]
    texts = iter(documents)
    conversation = Conversation(
        [message.for_template(texts) for message in body.messages],
        [_for_template(tool) for tool in body.use.offered],
        body.template_options(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    if body.context_management is None:
        return ChatPrompt(conversation, documents, None)
    engine, limit = server.engine, server.engine.context_length
    if limit is not None:
        refuse_long_text(engine, texts_of(conversation), limit, _MAX_CONTEXTS)

    def count(one: Conversation) -> int:
        """The tokens of a prompt, which may be longer than the context before it is edited."""
        if has_images(one):
            return len(engine.encode(one))
        return len(engine.encode(engine.render(one), add_special_tokens=False))

    edited, applied = edit_context(conversation, body.context_management, count)
    return ChatPrompt(edited, documents, applied)


def _for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as prompts describe it: whether it is strict says nothing to the model."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {"type": "function", "function": function}


class ChatWriter(ChoicesWriter):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def __init__(self, server: ServerState, call: EngineCall) -> None:
        super().__init__(server, call)
        self._deltas: dict[int, Deltas] = {}
        """By the index of the choice."""

    def opening(self, choice: Choice) -> dict[str, Any]:
        return _chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        tokens = choice.tokens_of(text)
        if choice.parser is None:
            return [_chunk(choice, {"content": text}, tokens)]
        deltas = self._deltas.setdefault(choice.index, Deltas())
        return deltas.chunks(choice, choice.parser.feed(text), tokens)

    def closing(self, choice: Choice) -> list[dict[str, Any]]:
        chunks, has_calls = [], False
        if choice.parser is not None:
            deltas = self._deltas.setdefault(choice.index, Deltas())
            chunks = deltas.chunks(choice, choice.last_parts(), None, final=True)
            has_calls = deltas.num_calls > 0
        return [*chunks, {**_chunk(choice, {}), "finish_reason": _reason(choice, has_calls)}]

    def complete(self, choice: Choice) -> dict[str, Any]:
        result = choice.result
        tokens = choice.tokens_of(result.output_text)
        message, has_calls = _message(choice)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None if tokens is None else chat_logprobs(tokens),
            "finish_reason": _reason(choice, has_calls),
        }


class Deltas:
    """The deltas of one streamed answer."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._waiting: list[ShownToken] = []
        """Tokens whose text is held back."""

    def chunks(
        self,
        choice: Choice,
        parts: Sequence[Part],
        tokens: list[ShownToken] | None,
        *,
        final: bool = False,
    ) -> list[dict[str, Any]]:
        """A chunk for each part; the first one has the log probabilities."""
        self._waiting += tokens or []
        deltas = [self._delta(part) for part in parts]
        if final and self._waiting and not deltas:
            deltas = [{}]
        chunks = []
        for delta in deltas:
            shown, self._waiting = self._waiting, []
            chunks.append(_chunk(choice, delta, shown or None))
        return chunks

    def _delta(self, part: Part) -> dict[str, Any]:
        match part.kind:
            case "content":
                return {"content": part.text}
            case "reasoning":
                return {"reasoning_content": part.text}
            case "call":
                self.num_calls += 1
                call = _call(ToolCall(part.text, ""))
                return {"tool_calls": [{"index": self.num_calls - 1, **call}]}
            case "arguments":
                more = {"arguments": part.text}
                return {"tool_calls": [{"index": self.num_calls - 1, "function": more}]}


def _message(choice: Choice) -> tuple[dict[str, Any], bool]:
    """The whole message, and whether it calls tools."""
    text = choice.result.output_text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.parser is None:
        return message, False
    found = collect(choice.all_parts())
    message["content"] = found.content
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.tool_calls:
        message["content"] = found.content or None
        message["tool_calls"] = [_call(call) for call in found.tool_calls]
    return message, bool(found.tool_calls)


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _reason(choice: Choice, has_calls: bool) -> str:
    reason = choice.result.finish_reason
    return "tool_calls" if has_calls and reason == "stop" else reason


def _chunk(
    choice: Choice, delta: dict[str, Any], tokens: list[ShownToken] | None = None
) -> dict[str, Any]:
    return {
        "index": choice.index,
        "delta": delta,
        "logprobs": None if tokens is None else chat_logprobs(tokens),
        "finish_reason": None,
    }
