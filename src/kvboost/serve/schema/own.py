"""The bodies of KVBoost's own endpoints: documents, pins, plans, tokens, adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Tag

from kvboost.config import MOST_CONTEXTS
from kvboost.results import LONGEST_ADAPTER_NAME
from kvboost.serve.schema import fields
from kvboost.serve.schema.requests import ChatRequest, CompletionRequest


class DocumentUpload(fields.OwnBody):
    """A document to keep and to read in advance."""

    text: fields.SomeText
    title: fields.ShortText | None = None
    """A line before the text, part of every prompt that has the document."""
    cache_salt: fields.ShortText = ""


class _ForTenant(fields.OwnBody):
    cache_salt: fields.ShortText = ""
    tenant: fields.Text | None = None
    """The name of the key whose text it is. Default: the caller's own."""


class _PinRequest(_ForTenant):
    ttl: fields.Ttl | None = None
    """Seconds; without it the pin has no end."""


class PinText(_PinRequest):
    """A text to read and to keep from being evicted."""

    text: fields.SomeText
    header: fields.Text | None = None
    """The text before it. Default: the beginning of a user's first message."""


class PinIds(_PinRequest):
    """Token ids to read and to keep from being evicted: the beginning of prompts."""

    token_ids: fields.TokenIds


class PinDocument(_PinRequest):
    """A document to keep from being evicted."""

    document_id: fields.ShortText


PinRequest = Annotated[
    Annotated[PinText, Tag("text")]
    | Annotated[PinIds, Tag("token_ids")]
    | Annotated[PinDocument, Tag("document_id")],
    fields.one_field(
        "an object with one of 'text', 'token_ids' and 'document_id'",
        {"text": PinText, "token_ids": PinIds, "document_id": PinDocument},
    ),
]


class WarmRequest(_ForTenant):
    """Documents to read before a request asks about them."""

    documents: Annotated[list[fields.SomeText], fields.some(fields.MAX_DOCUMENTS)]
    header: fields.Text | None = None
    """The text before each document. Default: the beginning of a user's first message."""
    contexts: Annotated[int, Field(ge=1, le=MOST_CONTEXTS), fields.WHOLE] = 1
    """In how many contexts each is read: at once after the header, then, in idle time, after the
    header and another of them, if there is one."""


class ChatPlan(ChatRequest):
    """A chat request to plan, not to answer."""

    model: fields.Text | None = None  # type: ignore[assignment]


class CompletionPlan(CompletionRequest):
    """A completion request, or only a prompt, to plan, not to answer."""

    model: fields.Text | None = None  # type: ignore[assignment]
    prompt: Annotated[
        Annotated[fields.SomeText, Tag("as text")] | Annotated[fields.TokenIds, Tag("as ids")],
        fields.one_of(fields.single_prompt_kind, "one prompt: a string or token ids, not empty"),
    ]


def _plan_kind(body: object) -> str | None:
    has_messages = isinstance(body, ChatPlan) or fields.has(body, "messages")
    if has_messages and fields.has(body, "prompt"):
        return None
    return "a chat" if has_messages else "a completion"


PlanRequest = Annotated[
    Annotated[ChatPlan, Tag("a chat")] | Annotated[CompletionPlan, Tag("a completion")],
    fields.one_of(_plan_kind, "an object with either 'messages' or 'prompt'"),
]


class ForgetText(fields.OwnBody):
    """A text to forget, wherever it occurs and whichever tenant sent it."""

    text: fields.SomeText


class ForgetSalt(_ForTenant):
    """A salt whose chunks are all to be forgotten."""

    cache_salt: fields.ShortText


ForgetRequest = Annotated[
    Annotated[ForgetText, Tag("text")] | Annotated[ForgetSalt, Tag("cache_salt")],
    fields.one_field(
        "an object with either 'text' or 'cache_salt'",
        {"text": ForgetText, "cache_salt": ForgetSalt},
    ),
]


class TokenizeText(fields.Body):
    """A text whose tokens are to be listed."""

    model: fields.Text | None = None
    prompt: fields.SomeText
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatRequest):
    """A conversation whose tokens are to be listed, as a chat request has it."""

    model: fields.Text | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


TokenizeRequest = Annotated[
    Annotated[TokenizeChat, Tag("messages")] | Annotated[TokenizeText, Tag("prompt")],
    fields.one_field(
        "an object with either 'prompt' or 'messages'",
        {"messages": TokenizeChat, "prompt": TokenizeText},
    ),
]


class DetokenizeRequest(fields.Body):
    """Tokens whose text is wanted."""

    model: fields.Text | None = None
    tokens: Annotated[list[fields.TokenId], fields.some(fields.MAX_TOKEN_IDS, least=0)] = Field(
        default_factory=list
    )


AdapterName = Annotated[fields.SomeText, Field(max_length=LONGEST_ADAPTER_NAME)]


class LoadAdapter(fields.Body):
    """An adapter to load. The path is one of the server's machine."""

    lora_name: AdapterName
    lora_path: fields.SomeText
    load_inplace: bool = False
    """Whether to replace the adapter of that name. Running requests finish with the old one."""


class UnloadAdapter(fields.Body):
    """An adapter to unload."""

    lora_name: AdapterName
