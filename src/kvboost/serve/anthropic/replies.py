"""Responses of Anthropic's API in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvboost.serve.schema.replies import EditsReply, Reply, ReuseReply


class ErrorDetails(Reply):
    error_code: str
    unsupported: list[str]


class AnthropicError(Reply):
    type: str
    message: str
    details: ErrorDetails | None = None


class AnthropicErrorReply(Reply):
    type: Literal["error"]
    error: AnthropicError
    request_id: str | None


class TextReply(Reply):
    type: Literal["text"]
    text: str


class ThinkingReply(Reply):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseReply(Reply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Reply):
    """All three kinds of input tokens together are the prompt."""

    input_tokens: int
    """Tokens that were not in the cache, and whose text was not marked by ``cache_control``."""
    cache_creation_input_tokens: int
    """Tokens that were not in the cache, of text that was marked."""
    cache_read_input_tokens: int
    """Rows that were not computed; ``kvboost.exact_tokens`` of them are exact."""
    output_tokens: int


class MessageReply(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextReply | ThinkingReply | ToolUseReply, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    context_management: EditsReply | None = None
    """There if the request has this field."""
    kvboost: ReuseReply


class OriginalCount(Reply):
    original_input_tokens: int


class TokenCount(Reply):
    input_tokens: int
    """Those of the prompt after the edits of ``context_management``."""
    context_management: OriginalCount | None = None
    """The tokens before the edits, if the request has this field."""
