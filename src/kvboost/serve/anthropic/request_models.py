"""The bodies of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvboost.serve.anthropic.blocks import AnthropicMessage, Content, text_of
from kvboost.serve.request_context import ContextManagement
from kvboost.serve.request_fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    Body,
    Effort,
    MaxTokens,
    Share,
    ShortText,
    SomeText,
    Temperature,
    Text,
    TopK,
    goes_with,
    some,
)
from kvboost.serve.request_formats import (
    JsonSchema,
    JsonSchemaFormat,
    SchemaDetails,
)
from kvboost.serve.request_generation import ReuseOptions
from kvboost.serve.request_marks import CacheControl, Mark, Marked, marks_of
from kvboost.serve.request_models import ChatRequest
from kvboost.serve.request_tools import (
    Function,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolName,
    make_use,
)


class AnthropicTool(Marked):
    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonSchema
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Changes nothing: arguments are always sent as they are written."""

    def for_chat(self) -> Tool:
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class AutoChoice(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Body):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolNameChoice(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body):
    type: Literal["none"]


AnthropicToolChoice = Annotated[
    AutoChoice | AnyChoice | ToolNameChoice | NoChoice, Field(discriminator="type")
]


class ThinkingEnabled(Body):
    type: Literal["enabled"]
    budget_tokens: MaxTokens
    """Changes nothing: the model ends its reasoning by itself, or at ``max_tokens``."""


class ThinkingAdaptive(Body):
    type: Literal["adaptive"]


class ThinkingDisabled(Body):
    type: Literal["disabled"]


Thinking = Annotated[
    ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")
]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Effort | None = None


class RequestMetadata(Body):
    user_id: ShortText | None = None


class CountTokensRequest(Body):
    """A conversation whose tokens are to be counted."""

    model: Text
    messages: Annotated[list[AnthropicMessage], some(MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], some(MAX_TOOLS, least=0)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    """Marks the end of the conversation."""
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None
    context_management: ContextManagement | None = None
    # Fields that are not supported.
    mcp_servers: None = None
    user_profile_id: None = None
    workspace_id: None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        last = self.messages[-1]
        if last.role == "assistant" and last.text != last.text.rstrip():
            raise goes_with(
                "messages",
                "messages: the beginning of an answer must not end with blanks: the model's next "
                "token begins with one",
            )
        make_use(self._tools(), self._choice(), None)
        return self

    def for_chat(self) -> ChatRequest:
        """The same as a chat request."""
        thinks = isinstance(self.thinking, (ThinkingEnabled, ThinkingAdaptive))
        return ChatRequest(
            model=self.model,
            messages=[*self._system(), *self._turns()],
            continue_final_message=self.messages[-1].role == "assistant",
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            tools=self._tools() or None,
            tool_choice=self._choice(),
            parallel_tool_calls=self._is_parallel(),
            response_format=self._format(),
            context_management=self.context_management,
            chat_template_kwargs={"enable_thinking": thinks},
        )

    def marks(self) -> list[Mark]:
        """Where ``cache_control`` occurs."""
        before = len(self._system())
        blocks = self.system if isinstance(self.system, list) else []
        first: list[Marked] = [*(self.tools or ()), *blocks]
        ends = [(before, one.cache_control) for one in first]
        for message in self.messages:
            before += len(message.for_chat())
            ends.append((before, message.mark))
        return marks_of([*ends, (before, self.cache_control)])

    def _system(self) -> list[Message]:
        return [] if self.system is None else [Message(role="system", content=text_of(self.system))]

    def _turns(self) -> list[Message]:
        return [turn for message in self.messages for turn in message.for_chat()]

    def _tools(self) -> list[Tool]:
        return [tool.for_chat() for tool in self.tools or ()]

    def _choice(self) -> Any:
        match self.tool_choice:
            case AnyChoice():
                return "required"
            case ToolNameChoice(name=name):
                return NamedTool(type="function", function=NamedFunction(name=name))
            case NoChoice():
                return "none"
            case _:
                return None

    def _is_parallel(self) -> bool:
        choice = self.tool_choice
        return choice is None or not getattr(choice, "disable_parallel_tool_use", None)

    def _format(self) -> JsonSchemaFormat | None:
        if self.output_config is None or (chosen := self.output_config.format) is None:
            return None
        details = SchemaDetails(schema=chosen.schema_)
        return JsonSchemaFormat(type="json_schema", json_schema=details)


class MessagesRequest(CountTokensRequest):
    """A request of the Messages API."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[list[SomeText], some(MAX_STOPS, least=0)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stream: bool | None = None
    # Not in Anthropic's API.
    cache_salt: ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()
    # Fields that are not supported.
    container: None = None
    diagnostics: None = None
    inference_geo: None = None
    thread: None = None

    def for_chat(self) -> ChatRequest:
        return (
            super()
            .for_chat()
            .model_copy(
                update={
                    "max_tokens": self.max_tokens,
                    "stop": self.stop_sequences,
                    "temperature": self.temperature,
                    "top_p": self.top_p,
                    "top_k": self.top_k,
                    "cache_salt": self.cache_salt,
                    "kvboost": self.kvboost,
                }
            )
        )
