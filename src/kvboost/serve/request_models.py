"""What clients may send. An unknown field is refused by name, and so is a field whose only allowed
value is None.

Every list and object has a limit, and a list is refused at its first wrong item. So checking a body
never takes longer than parsing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from kvboost.chat.tool_use import ToolUse
from kvboost.config import MOST_CONTEXTS
from kvboost.serve.request_documents import SessionId, Ttl
from kvboost.serve.request_fields import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_N,
    MAX_PROMPTS,
    MAX_STOPS,
    MAX_TOOLS,
    WHOLE,
    Body,
    LogitBias,
    MaxTokens,
    Metadata,
    No,
    Penalty,
    Seed,
    Share,
    ShortText,
    SomeText,
    Speculate,
    Temperature,
    TemplateOptions,
    Text,
    TokenIds,
    TopK,
    goes_with,
    one_of,
    prompt_kind,
    single_prompt_kind,
    some,
    stop_kind,
)
from kvboost.serve.request_formats import Formats, ResponseFormat, response_options
from kvboost.serve.request_tools import Message, Tool, ToolChoice, make_use


def needs(field: str, kind: str, other: str, has: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON Schema for: ``field``, if it is of this ``kind``, needs ``other``, which must be true or
    as ``has`` says."""
    return {
        "if": {"properties": {field: {"type": kind}}, "required": [field]},
        "then": {"properties": {other: has or {"const": True}}, "required": [other]},
    }


class ReuseOptions(Body):
    """How this request reuses cached text. Default: the server's settings."""

    model_config = ConfigDict(
        frozen=True,  # so that requests share the default
        json_schema_extra=needs("session_ttl", "number", "session", {"type": "string"}),
    )

    mode: Literal["baseline", "prefix_cache", "chunk_kv_reuse"] | None = None
    strategy: Literal["auto", "query", "cacheblend", "selective", "none"] | None = None
    ratio: Share | None = None
    heal: Literal["auto", "idle", "off"] | None = None
    exactness: Literal["repaired", "verified"] | None = None
    speculate: Speculate | None = None
    """Whether tokens are drafted, and how many at most."""
    session: SessionId | None = None
    """The conversation that this request belongs to. Its KV is pinned after the answer."""
    session_ttl: Ttl | None = None
    """For how many seconds; default: the server's."""
    explain: bool = False
    """Whether the spans of the answer include their text."""

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        if self.session_ttl is not None and self.session is None:
            raise goes_with("session_ttl", "session_ttl goes with session")
        return self


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: No | None = None


class Generation(Formats):
    """The fields that chat and completions share."""

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[
            Annotated[SomeText, Tag("as text")]
            | Annotated[list[SomeText], some(MAX_STOPS, least=0), Tag("as list")],
            one_of(stop_kind, f"a string that is not empty, or a list of up to {MAX_STOPS}"),
        ]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    cache_salt: ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise goes_with("stream_options", "stream_options goes with stream=true")
        return self


class ChatRequest(Generation):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                needs("stream_options", "object", "stream"),
                needs("top_logprobs", "integer", "logprobs"),
            ]
        }
    )

    messages: Annotated[list[Message], some(MAX_MESSAGES)]
    tools: Annotated[list[Tool], some(MAX_TOOLS, least=0)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    # Fields that may say what happens anyway.
    metadata: Metadata | None = None
    modalities: Annotated[list[Literal["text"]], some(1)] | None = None
    prompt_cache_key: ShortText | None = None
    reasoning_effort: Literal["none"] | None = None
    safety_identifier: ShortText | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No | None = None
    verbosity: Literal["medium"] | None = None
    # Fields that are not supported.
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise goes_with("top_logprobs", "top_logprobs goes with logprobs=true")
        self.tool_use()
        return self

    def tool_use(self) -> ToolUse:
        return make_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def formats(self) -> dict[str, dict[str, Any]]:
        return response_options(self.response_format) | super().formats()

    def template_options(self) -> dict[str, Any]:
        """What the chat template is asked for."""
        thinks = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return thinks | (self.chat_template_kwargs or {})


_NOTHING: dict[str, Any] = {"type": "null"}
_BEST_OF_IS_N: dict[str, Any] = {
    "anyOf": [
        {"properties": {"best_of": _NOTHING}},
        {"properties": {"best_of": {"const": 1}, "n": {"enum": [None, 1]}}},
        *(
            {"properties": {"best_of": {"const": n}, "n": {"const": n}}, "required": ["n"]}
            for n in range(2, MAX_N + 1)
        ),
    ]
}
_ECHO_ALONE: dict[str, Any] = {
    "anyOf": [
        {"properties": {"echo": {"enum": [None, False]}}},
        {"properties": {"logprobs": _NOTHING}},
    ]
}


class CompletionRequest(Generation):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [needs("stream_options", "object", "stream"), _BEST_OF_IS_N, _ECHO_ALONE]
        }
    )

    prompt: Annotated[
        Annotated[SomeText, Tag("as text")]
        | Annotated[list[SomeText], some(MAX_PROMPTS), Tag("as texts")]
        | Annotated[TokenIds, Tag("as ids")]
        | Annotated[list[TokenIds], some(MAX_PROMPTS), Tag("as lists of ids")],
        one_of(
            prompt_kind,
            f"a string, token ids, or a list of up to {MAX_PROMPTS} of either; none of them empty",
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise goes_with(
                "best_of",
                f"best_of={self.best_of} must be equal to n, which is {self.n or 1}: this server "
                "returns every answer",
            )
        if self.echo and self.logprobs is not None:
            raise goes_with("echo", "echo does not go with logprobs: the prompt has none")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, even if there is only one."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]


class WarmRequest(Body):
    """Documents to read before a request asks about them."""

    documents: Annotated[list[SomeText], some(MAX_DOCUMENTS)]
    header: Text | None = None
    """The text before each document. Default: the beginning of a user's first message."""
    contexts: Annotated[int, Field(ge=1, le=MOST_CONTEXTS), WHOLE] = 1
    """In how many contexts each is read: at once after the header, then, in idle time, after the
    header and another of them, if there is one."""
    cache_salt: ShortText = ""
    tenant: Text | None = None
    """The name of the key to read them for. Default: the caller's own."""


class ChatPlan(ChatRequest):
    """A chat request to plan, not to answer."""

    model: Text | None = None  # type: ignore[assignment]


class CompletionPlan(CompletionRequest):
    """A completion request, or only a prompt, to plan, not to answer."""

    model: Text | None = None  # type: ignore[assignment]
    prompt: Annotated[
        Annotated[SomeText, Tag("as text")] | Annotated[TokenIds, Tag("as ids")],
        one_of(single_prompt_kind, "one prompt: a string or token ids, not empty"),
    ]


def _plan_kind(body: object) -> str:
    has_messages = isinstance(body, ChatPlan) or (isinstance(body, dict) and "messages" in body)
    return "a chat" if has_messages else "a completion"


PlanRequest = Annotated[
    Annotated[ChatPlan, Tag("a chat")] | Annotated[CompletionPlan, Tag("a completion")],
    Discriminator(_plan_kind),
]


class ForgetText(Body):
    """A text to forget, wherever it occurs and whichever tenant sent it."""

    text: SomeText


class ForgetSalt(Body):
    """A salt whose chunks are all to be forgotten."""

    cache_salt: ShortText
    tenant: Text | None = None
    """The name of the key whose salt it is. Default: the caller's own."""


def _forget_kind(body: object) -> str | None:
    given = body if isinstance(body, dict) else {}
    has_text = isinstance(body, ForgetText) or "text" in given
    has_salt = isinstance(body, ForgetSalt) or "cache_salt" in given
    return None if has_text == has_salt else "a salt" if has_salt else "a text"


ForgetRequest = Annotated[
    Annotated[ForgetText, Tag("a text")] | Annotated[ForgetSalt, Tag("a salt")],
    one_of(_forget_kind, "an object with either 'text' or 'cache_salt'"),
]
