"""The bodies of the Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, Tag, model_validator

from kvboost.chat.tool_use import ToolUse
from kvboost.serve.openai_responses.items import Item, messages_of
from kvboost.serve.schema import chat, fields
from kvboost.serve.schema.formats import JsonObjectFormat, JsonSchema, SchemaDetails, TextFormat
from kvboost.serve.schema.generation import NEEDS_STREAM, ReuseOptions
from kvboost.serve.schema.requests import ChatRequest


class FunctionTool(fields.Body):
    """``type`` comes first: the error about another kind of tool names it."""

    type: Literal["function"]
    name: chat.ToolName
    description: fields.Text | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    def described(self) -> dict[str, Any]:
        return chat.described_tool(**self.model_dump(exclude={"type"}))


class NamedFunctionTool(fields.Body):
    type: Literal["function"]
    name: chat.ToolName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedFunctionTool, Tag("a tool")],
    fields.one_of(
        chat.choice_kind, "'none', 'auto', 'required' or {'type': 'function', 'name': ...}"
    ),
]


class SchemaFormat(SchemaDetails):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class TextOptions(fields.Body):
    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Changes nothing."""


class ReasoningOptions(fields.Body):
    effort: fields.Effort | None = None
    generate_summary: fields.ShortText | None = None
    summary: fields.ShortText | None = None
    """Changes nothing, and so does ``generate_summary``: the reasoning itself is in the answer."""


class ResponseStreamOptions(fields.Body):
    include_obfuscation: bool | None = None
    """Changes nothing: no event is padded."""


Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
"""The values of ``include``. Nothing of this occurs here: reasoning is not encrypted, there are no
built-in tools, and images are in the conversation as they were sent."""


_SAME = (
    *("model", "chat_template_kwargs", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("ignore_eos", "prompt_cache_key", "prompt_cache_retention", "cache_salt", "kvboost"),
)
"""The fields that a chat request has, too."""


class ResponseRequest(fields.Body):
    """A request of the Responses API."""

    model_config = ConfigDict(json_schema_extra={"allOf": [NEEDS_STREAM]})

    model: fields.Text
    input: Annotated[
        Annotated[fields.SomeText, Tag("as text")]
        | Annotated[list[Item], fields.some(fields.MAX_MESSAGES), Tag("as list")],
        fields.one_of(fields.text_or_list, "a string or a list of items"),
    ]
    instructions: fields.Text | None = None
    previous_response_id: fields.ShortText | None = None
    tools: Annotated[list[FunctionTool], fields.some(fields.MAX_TOOLS, least=0)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    max_output_tokens: fields.MaxTokens | None = None
    metadata: fields.Metadata | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """With ``auto``, a conversation that does not fit the context loses its oldest messages."""
    prompt_cache_key: fields.ShortText | None = None
    prompt_cache_retention: chat.Retention | None = None
    # Not in OpenAI's API.
    top_k: fields.TopK | None = None
    min_p: fields.Share | None = None
    seed: fields.Seed | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: fields.TemplateOptions | None = None
    cache_salt: fields.ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()
    # Fields that change no answer here.
    background: fields.No | None = None
    include: Annotated[list[Included], fields.some(16, least=0)] | None = None
    max_tool_calls: Annotated[int, fields.WHOLE] | None = None
    """Of built-in tools, which there are none of."""
    safety_identifier: fields.ShortText | None = None
    service_tier: fields.ShortText | None = None
    user: fields.ShortText | None = None
    # Fields that are not supported.
    context_management: None = None
    conversation: None = None
    prompt: None = None
    top_logprobs: None = None
    _use: ToolUse = PrivateAttr(default=ToolUse())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fields.goes_with("stream_options", "stream_options goes with stream=true")
        self._use = chat.make_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self

    def new_messages(self) -> list[chat.Message]:
        """The messages that this request adds to its conversation."""
        if isinstance(self.input, str):
            return [chat.Message(role="user", content=self.input)]
        return messages_of(self.input)

    def for_chat(self, messages: Sequence[chat.Message]) -> ChatRequest:
        """The same as a chat request about the conversation ``messages``. The instructions come
        first, and are no part of the conversation."""
        system = self.instructions
        first = [] if system is None else [chat.Message(role="system", content=system)]
        chosen = self.text and self.text.format
        wanted = None
        if isinstance(chosen, SchemaFormat | JsonObjectFormat):
            wanted = chosen.schema_ if isinstance(chosen, SchemaFormat) else {"type": "object"}
        return ChatRequest.translated(
            self._use,
            messages=[*first, *messages],
            guided_json=wanted,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            max_completion_tokens=self.max_output_tokens,
            **{name: getattr(self, name) for name in _SAME},
        )
