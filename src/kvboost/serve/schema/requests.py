"""The bodies of OpenAI's API for chat and completions. A field whose only allowed value is None is
known and not supported: it is refused by name.

Every list and object has a limit, and a list is refused at its first wrong item. So checking a body
never takes longer than parsing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from kvboost.chat.tool_use import ToolUse
from kvboost.serve.schema import chat, fields
from kvboost.serve.schema.formats import ResponseFormat, response_options
from kvboost.serve.schema.generation import NEEDS_STREAM, ContextManagement, Generation, needs

DEFAULT_MAX_TOKENS = 16  # OpenAI's, of a completion


class ChatRequest(Generation):
    model_config = ConfigDict(
        json_schema_extra={"allOf": [NEEDS_STREAM, needs("top_logprobs", "integer", "logprobs")]}
    )

    messages: Annotated[list[chat.Message], fields.some(fields.MAX_MESSAGES)]
    tools: Annotated[list[chat.Tool], fields.some(fields.MAX_TOOLS, least=0)] | None = None
    tool_choice: chat.ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: fields.TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which is the assistant's."""
    reasoning_effort: fields.Effort | None = None
    thinking: chat.Thinking | None = None
    enable_thinking: bool | None = None
    context_management: ContextManagement | None = None
    cache_control: chat.CacheControl | None = None
    """Marks the end of the conversation."""
    prompt_cache_key: fields.ShortText | None = None
    prompt_cache_retention: chat.Retention | None = None
    max_completion_tokens: fields.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: fields.Logprobs | None = None
    # Fields that change no answer here.
    best_of: Literal[1] | None = None
    metadata: fields.Metadata | None = None
    modalities: Annotated[list[Literal["text"]], fields.some(1)] | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: fields.ShortText | None = None
    service_tier: fields.ShortText | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # Fields that are not supported.
    audio: None = None
    chat_template: None = None
    documents: None = None
    function_call: None = None
    functions: None = None
    web_search_options: None = None
    _use: ToolUse | None = PrivateAttr(default=None)

    @classmethod
    def translated(cls, use: ToolUse, **given: Any) -> Self:
        """A request of another API, whose tools have been checked. Raises ValidationError if it
        has more than a chat request may have."""
        return cls.model_validate(given, context=use)

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise fields.goes_with("top_logprobs", "top_logprobs goes with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise fields.goes_with(
                "continue_final_message",
                "continue_final_message does not go with add_generation_prompt=true",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise fields.goes_with(
                "continue_final_message",
                "continue_final_message needs a last message of the assistant's",
            )
        if isinstance(info.context, ToolUse):
            self._use = info.context
        elif self._use is None:  # pydantic checks again what becomes part of another object
            self._use = chat.make_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self

    @property
    def use(self) -> ToolUse:
        assert self._use is not None
        return self._use

    @property
    def longest_answer(self) -> int | None:
        limits = (self.max_completion_tokens, self.max_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    def engine_options(self) -> dict[str, Any]:
        top = (self.top_logprobs or 0) if self.logprobs else None
        return {**super().engine_options(), "logprobs": top}

    def formats(self) -> dict[str, dict[str, Any]]:
        return response_options(self.response_format) | super().formats()

    def marks(self) -> list[chat.Mark]:
        """Where ``cache_control`` occurs. That of a tool marks the first system messages, too."""
        messages = self.messages
        others = (n for n, one in enumerate(messages) if one.role not in ("system", "developer"))
        system = next(others, len(messages))
        ends = [(system, tool.cache_control) for tool in self.tools or ()]
        ends += [(number, one.mark) for number, one in enumerate(messages, 1)]
        return chat.marks_of([*ends, (len(messages), self.cache_control)])

    def template_options(self) -> dict[str, Any]:
        """The options that are given to the chat template. A template uses those that it knows."""
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
            for n in range(2, fields.MAX_N + 1)
        ),
    ]
}


class CompletionRequest(Generation):
    model_config = ConfigDict(json_schema_extra={"allOf": [NEEDS_STREAM, _BEST_OF_IS_N]})

    prompt: Annotated[
        Annotated[fields.SomeText, Tag("as text")]
        | Annotated[list[fields.SomeText], fields.some(fields.MAX_PROMPTS), Tag("as texts")]
        | Annotated[fields.TokenIds, Tag("as ids")]
        | Annotated[list[fields.TokenIds], fields.some(fields.MAX_PROMPTS), Tag("as lists of ids")],
        fields.several_prompts(fields.MAX_PROMPTS),
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), fields.WHOLE] | None = None
    """0 gives no answer: with ``echo`` and ``logprobs``, it describes the prompt."""
    logprobs: fields.Logprobs | None = None
    echo: bool | None = None
    suffix: fields.SomeText | None = None
    """The text after the answer, for models that fill in the middle."""
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Field(ge=1, le=fields.MAX_N), fields.WHOLE] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise fields.goes_with(
                "best_of",
                f"best_of={self.best_of} must be equal to n, which is {self.n or 1}: this server "
                "returns every answer",
            )
        return self

    def formats(self) -> dict[str, dict[str, Any]]:
        return response_options(self.response_format) | super().formats()

    def engine_options(self) -> dict[str, Any]:
        options = {**super().engine_options(), "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            options["prompt_logprobs"] = self.logprobs
        return options

    @property
    def longest_answer(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> Sequence[str | list[int]]:
        return fields.as_prompts(self.prompt)
