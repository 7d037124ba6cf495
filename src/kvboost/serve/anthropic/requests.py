"""Messages of Anthropic's API, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from kvboost.chat.tool_use import ToolUse
from kvboost.serve.schema import chat, fields
from kvboost.serve.schema.formats import JsonSchema
from kvboost.serve.schema.generation import ContextManagement, ReuseOptions
from kvboost.serve.schema.requests import ChatRequest


class TextBlock(chat.Marked):
    type: Annotated[Literal["text"], BeforeValidator(chat.refuse_other_parts)]
    text: fields.Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


_LIKE = fields.one_of(
    fields.text_or_list, "a string or a list of blocks like {'type': 'text', 'text': ...}"
)
Content = Annotated[
    fields.TextOrList[
        fields.Text, Annotated[list[TextBlock], fields.some(fields.MAX_PARTS, least=0)]
    ],
    _LIKE,
]


class Citations(fields.Body):
    enabled: fields.No | None = None


class PlainSource(fields.Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: fields.Text


class ContentSource(fields.Body):
    type: Literal["content"]
    content: Content


def _kind_of(*kinds: str) -> Callable[[Any], str | None]:
    """The ``type`` of an object, if it is one of ``kinds``. Blocks of other media are taken for
    text, whose error says that they are not supported."""

    def kind(value: Any) -> str | None:
        found = fields.type_of(value)
        if not isinstance(found, str):
            return None
        is_other = "text" in kinds and found in chat.OTHER_PARTS
        return found if found in kinds else "text" if is_other else None

    return kind


class DocumentBlock(chat.Marked):
    """A document as text. It comes under its title, as uploaded documents do."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainSource, Tag("text")] | Annotated[ContentSource, Tag("content")],
        fields.one_of(_kind_of("text", "content"), "a source of the type text or content"),
    ]
    title: fields.ShortText | None = None
    context: fields.Text | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        source = self.source
        said = source.data if isinstance(source, PlainSource) else text_of(source.content)
        return "\n\n".join(filter(None, (self.title, self.context, said)))


class SearchResultBlock(chat.Marked):
    """A result of a search: text under its title and source."""

    type: Literal["search_result"]
    source: fields.ShortText
    title: fields.ShortText
    content: Annotated[list[TextBlock], fields.some(fields.MAX_PARTS)]
    citations: Citations | None = None

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.source}\n\n{text_of(self.content)}"


class Base64Source(fields.Body):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: fields.Text

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(fields.Body):
    type: Literal["url"]
    url: chat.ImageUrl


class ImageBlock(chat.Marked):
    type: Annotated[Literal["image"], BeforeValidator(chat.count_image)]
    source: Annotated[
        Annotated[Base64Source, Tag("base64")] | Annotated[UrlSource, Tag("url")],
        fields.one_of(_kind_of("base64", "url"), "a source of the type base64 or url"),
    ]

    def for_chat(self) -> chat.ImagePart:
        return chat.ImagePart.of(self.source.url)


TextualBlock = TextBlock | DocumentBlock | SearchResultBlock


class ThinkingBlock(fields.Body):
    type: Literal["thinking"]
    thinking: fields.Text
    signature: fields.Text = ""


class ToolUseBlock(chat.Marked):
    type: Literal["tool_use"]
    id: fields.ShortText
    name: chat.ToolName
    input: chat.Arguments


_TEXTS = ("text", "document", "search_result")

_TextualBlock = (
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
)
_ResultBlock = Annotated[
    _TextualBlock,
    fields.one_of(_kind_of(*_TEXTS), f"a block of one of the types {', '.join(_TEXTS)}"),
]
ResultContent = Annotated[
    fields.TextOrList[
        fields.Text, Annotated[list[_ResultBlock], fields.some(fields.MAX_PARTS, least=0)]
    ],
    _LIKE,
]


class ToolResultBlock(chat.Marked):
    type: Literal["tool_result"]
    tool_use_id: fields.ShortText
    content: ResultContent | None = None
    is_error: bool | None = None

    def for_chat(self) -> chat.Message:
        content = text_of(self.content or "")
        said = f"Error: {content}" if self.is_error else content
        return chat.Message(role="tool", tool_call_id=self.tool_use_id, content=said)


_KINDS = (*_TEXTS, "image", "thinking", "tool_use", "tool_result")

Block = Annotated[
    _TextualBlock
    | Annotated[SkipJsonSchema[ImageBlock], Tag("image")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    fields.one_of(_kind_of(*_KINDS), f"a block of one of the types {', '.join(_KINDS)}"),
]

_ROLES = {
    **dict.fromkeys(("thinking", "tool_use"), "assistant"),
    **dict.fromkeys(("tool_result", "document", "search_result", "image"), "user"),
}


class AnthropicMessage(fields.Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        fields.TextOrList[fields.Text, Annotated[list[Block], fields.some(fields.MAX_PARTS)]], _LIKE
    ]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for block in self.blocks:
            if self.role != _ROLES.get(block.type, self.role):
                said = f"a {block.type} block goes with the role {_ROLES[block.type]}"
                raise fields.goes_with("content", said)
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    def for_chat(self) -> list[chat.Message]:
        """Results of tools are messages of their own."""
        if self.role == "assistant":
            return [_assistant(self.blocks)]
        messages: list[chat.Message] = []
        for is_result, blocks in groupby(
            self.blocks, lambda block: isinstance(block, ToolResultBlock)
        ):
            if is_result:
                messages += [one.for_chat() for one in blocks if isinstance(one, ToolResultBlock)]
            else:
                messages.append(chat.Message(role=self.role, content=_parts(blocks)))
        return messages

    @property
    def text(self) -> str:
        """Its text, apart from tools and reasoning."""
        return text_of([block for block in self.blocks if isinstance(block, TextualBlock)])

    @property
    def mark(self) -> chat.CacheControl | None:
        """The last mark in this message."""
        marks = [block.cache_control for block in self.blocks if isinstance(block, chat.Marked)]
        return next((mark for mark in reversed(marks) if mark is not None), None)


def text_of(content: str | Sequence[TextualBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _assistant(blocks: Iterable[Block]) -> chat.Message:
    blocks = list(blocks)
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        chat.Call(id=block.id, function=chat.CalledFunction.of(block.name, block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return chat.Message(
        role="assistant",
        content=_parts(blocks) or "",
        reasoning_content="\n".join(reasoning) or None,
        tool_calls=calls or None,
    )


def _parts(blocks: Iterable[Block]) -> list[chat.ContentPart]:
    return [
        block.for_chat()
        if isinstance(block, ImageBlock)
        else chat.TextPart(type="text", text=block.text)
        for block in blocks
        if isinstance(block, TextualBlock | ImageBlock)
    ]


class AnthropicTool(chat.Marked):
    type: Literal["custom"] | None = None
    name: chat.ToolName
    description: fields.Text | None = None
    input_schema: JsonSchema
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Changes nothing: arguments are always sent as they are written."""

    def described(self) -> dict[str, Any]:
        return chat.described_tool(
            self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )


class FreeChoice(fields.Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class ToolNameChoice(fields.Body):
    type: Literal["tool"]
    name: chat.ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(fields.Body):
    type: Literal["none"]


AnthropicToolChoice = Annotated[FreeChoice | ToolNameChoice | NoChoice, Field(discriminator="type")]


class ThinkingEnabled(fields.Body):
    type: Literal["enabled"]
    budget_tokens: fields.MaxTokens
    """Changes nothing: the model ends its reasoning by itself, or at ``max_tokens``."""


class OtherThinking(fields.Body):
    type: Literal["adaptive", "disabled"]


_CHOICES = {"any": "required", "none": "none", "auto": None}
"""In OpenAI's words."""
Thinking = Annotated[ThinkingEnabled | OtherThinking, Field(discriminator="type")]


class OutputFormat(fields.Body):
    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(fields.Body):
    format: OutputFormat | None = None
    effort: fields.Effort | None = None


class RequestMetadata(fields.Body):
    user_id: fields.ShortText | None = None


class CountTokensRequest(fields.Body):
    """A conversation whose tokens are to be counted."""

    model: fields.Text
    messages: Annotated[list[AnthropicMessage], fields.some(fields.MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], fields.some(fields.MAX_TOOLS, least=0)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: chat.CacheControl | None = None
    """Marks the end of the conversation."""
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None
    context_management: ContextManagement | None = None
    # Fields that are not supported.
    mcp_servers: None = None
    user_profile_id: None = None
    workspace_id: None = None
    _use: ToolUse = PrivateAttr(default=ToolUse())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        last = self.messages[-1]
        if last.role == "assistant" and last.text != last.text.rstrip():
            raise fields.goes_with(
                "messages",
                "messages: the beginning of an answer must not end with blanks: the model's next "
                "token begins with one",
            )
        choice = self.tool_choice
        self._use = chat.make_use(
            self.tools,
            choice
            if choice is None or isinstance(choice, ToolNameChoice)
            else _CHOICES[choice.type],
            not getattr(choice, "disable_parallel_tool_use", None),
        )
        return self

    def for_chat(self, **more: Any) -> ChatRequest:
        """The same as a chat request, with ``more`` fields."""
        output = self.output_config or OutputConfig()
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return ChatRequest.translated(
            self._use,
            model=self.model,
            messages=[*self._system(), *(turn for one in self.messages for turn in one.for_chat())],
            continue_final_message=self.messages[-1].role == "assistant",
            reasoning_effort=output.effort,
            guided_json=None if output.format is None else output.format.schema_,
            context_management=self.context_management,
            chat_template_kwargs={"enable_thinking": thinks},
            **more,
        )

    def marks(self) -> list[chat.Mark]:
        """Where ``cache_control`` occurs."""
        before = len(self._system())
        blocks = self.system if isinstance(self.system, list) else []
        first: list[chat.Marked] = [*(self.tools or ()), *blocks]
        ends = [(before, one.cache_control) for one in first]
        for message in self.messages:
            before += len(message.for_chat())
            ends.append((before, message.mark))
        return chat.marks_of([*ends, (before, self.cache_control)])

    def _system(self) -> list[chat.Message]:
        system = self.system
        return [] if system is None else [chat.Message(role="system", content=text_of(system))]


class MessagesRequest(CountTokensRequest):
    """A request of the Messages API."""

    max_tokens: fields.MaxTokens
    stop_sequences: (
        Annotated[list[fields.SomeText], fields.some(fields.MAX_STOPS, least=0)] | None
    ) = None
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stream: bool | None = None
    # Not in Anthropic's API.
    cache_salt: fields.ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()
    # Fields that are not supported.
    container: None = None
    diagnostics: None = None
    inference_geo: None = None
    thread: None = None

    def for_chat(self, **more: Any) -> ChatRequest:
        same = ("max_tokens", "temperature", "top_p", "top_k", "cache_salt", "kvboost")
        given = {name: getattr(self, name) for name in same}
        return super().for_chat(**given, stop=self.stop_sequences, **more)
