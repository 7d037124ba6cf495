"""What clients may send. A field whose only allowed value is None is known and not supported: it is
refused by name.

Every list and object has a limit, and a list is refused at its first wrong item. So checking a body
never takes longer than parsing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, Tag, model_validator

from kvboost.chat.tool_use import ToolUse
from kvboost.config import MOST_CONTEXTS
from kvboost.serve.request_context import ContextManagement
from kvboost.serve.request_fields import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_N,
    MAX_PROMPTS,
    MAX_TOOLS,
    WHOLE,
    Effort,
    MaxTokens,
    Metadata,
    OwnBody,
    ShortText,
    SomeText,
    TemplateOptions,
    Text,
    TokenIds,
    goes_with,
    has,
    one_of,
    prompt_kind,
    single_prompt_kind,
    some,
)
from kvboost.serve.request_formats import ResponseFormat, response_options
from kvboost.serve.request_generation import Generation, needs
from kvboost.serve.request_marks import CacheControl, Mark, Retention, marks_of
from kvboost.serve.request_tools import Message, Thinking, Tool, ToolChoice, make_use


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
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which is the assistant's."""
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    """Marks the end of the conversation."""
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Retention | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    # Fields that change no answer here.
    best_of: Literal[1] | None = None
    metadata: Metadata | None = None
    modalities: Annotated[list[Literal["text"]], some(1)] | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: ShortText | None = None
    service_tier: ShortText | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # Fields that are not supported.
    audio: None = None
    chat_template: None = None
    documents: None = None
    function_call: None = None
    functions: None = None
    web_search_options: None = None
    _tool_use: ToolUse | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise goes_with("top_logprobs", "top_logprobs goes with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise goes_with(
                "continue_final_message",
                "continue_final_message does not go with add_generation_prompt=true",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise goes_with(
                "continue_final_message",
                "continue_final_message needs a last message of the assistant's",
            )
        self.tool_use()
        return self

    def tool_use(self) -> ToolUse:
        if self._tool_use is None:  # describing tools takes a while, and several ask for it
            self._tool_use = make_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self._tool_use

    def formats(self) -> dict[str, dict[str, Any]]:
        return response_options(self.response_format) | super().formats()

    def marks(self) -> list[Mark]:
        """Where ``cache_control`` occurs. That of a tool marks the first system messages, too."""
        messages = self.messages
        others = (n for n, one in enumerate(messages) if one.role not in ("system", "developer"))
        system = next(others, len(messages))
        ends = [(system, tool.cache_control) for tool in self.tools or ()]
        ends += [(number, one.mark) for number, one in enumerate(messages, 1)]
        return marks_of([*ends, (len(messages), self.cache_control)])

    def template_options(self) -> dict[str, Any]:
        """What the chat template is asked for. A template uses the names that it knows."""
        asked: dict[str, Any] = {}
        if self.thinking is not None:
            asked["enable_thinking"] = self.thinking.type != "disabled"
        if self.enable_thinking is not None:
            asked["enable_thinking"] = self.enable_thinking
        if self.reasoning_effort == "none":
            asked["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            asked["reasoning_effort"] = self.reasoning_effort
        return asked | (self.chat_template_kwargs or {})


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


class CompletionRequest(Generation):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                needs("stream_options", "object", "stream"),
                _BEST_OF_IS_N,
            ]
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
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    """0 gives no answer: with ``echo`` and ``logprobs``, it describes the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = None
    suffix: SomeText | None = None
    """The text after the answer, for models that fill in the middle."""
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise goes_with(
                "best_of",
                f"best_of={self.best_of} must be equal to n, which is {self.n or 1}: this server "
                "returns every answer",
            )
        return self

    def formats(self) -> dict[str, dict[str, Any]]:
        return response_options(self.response_format) | super().formats()

    def engine_options(self) -> dict[str, Any]:
        options = super().engine_options()
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            options["prompt_logprobs"] = self.logprobs
        return options

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, even if there is only one."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]


class WarmRequest(OwnBody):
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


def _plan_kind(body: object) -> str | None:
    has_messages = isinstance(body, ChatPlan) or has(body, "messages")
    if has_messages and has(body, "prompt"):
        return None
    return "a chat" if has_messages else "a completion"


PlanRequest = Annotated[
    Annotated[ChatPlan, Tag("a chat")] | Annotated[CompletionPlan, Tag("a completion")],
    one_of(_plan_kind, "an object with either 'messages' or 'prompt'"),
]


class ForgetText(OwnBody):
    """A text to forget, wherever it occurs and whichever tenant sent it."""

    text: SomeText


class ForgetSalt(OwnBody):
    """A salt whose chunks are all to be forgotten."""

    cache_salt: ShortText
    tenant: Text | None = None
    """The name of the key whose salt it is. Default: the caller's own."""


def _forget_kind(body: object) -> str | None:
    has_text = isinstance(body, ForgetText) or has(body, "text")
    has_salt = isinstance(body, ForgetSalt) or has(body, "cache_salt")
    return None if has_text == has_salt else "a salt" if has_salt else "a text"


ForgetRequest = Annotated[
    Annotated[ForgetText, Tag("a text")] | Annotated[ForgetSalt, Tag("a salt")],
    one_of(_forget_kind, "an object with either 'text' or 'cache_salt'"),
]
