"""Responses of the Responses API in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvboost.serve.openai_responses.items import Status
from kvboost.serve.schema.replies import Reply, ReuseReply


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Reply):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Reply):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    """JSON text."""


class OutputReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Reply):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[OutputReasoningText]


class InputDetails(Reply):
    cached_tokens: int
    """Rows that were not computed."""
    exact_tokens: int
    """Those of them that are what the model would have computed."""
    cache_write_tokens: int
    """The other rows of the prompt. All of them are cached now."""


class OutputDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseReply(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[
        Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]
    ]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage
    user: str | None
    kvboost: ReuseReply


class InputText(Reply):
    type: Literal["input_text", "output_text"]
    text: str


class InputItem(Reply):
    """A message, a call or its result."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: Literal["completed"]
    role: str | None = None
    content: list[InputText | OutputReasoningText] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class ItemList(Reply):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
