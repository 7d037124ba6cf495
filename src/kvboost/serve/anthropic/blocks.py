"""Messages of Anthropic's API, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator

from kvboost.serve.request_fields import (
    MAX_PARTS,
    Body,
    No,
    ShortText,
    Text,
    goes_with,
    one_of,
    some,
    text_or_list,
)
from kvboost.serve.request_marks import CacheControl, Marked
from kvboost.serve.request_tools import (
    OTHER_PARTS,
    Call,
    CalledFunction,
    ContentPart,
    Message,
    TextPart,
    ToolName,
    refuse_other_parts,
    shallow,
)


class TextBlock(Marked):
    type: Annotated[Literal["text"], BeforeValidator(refuse_other_parts)]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


Content = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[list[TextBlock], some(MAX_PARTS, least=0), Tag("as list")],
    one_of(text_or_list, "a string or a list of blocks like {'type': 'text', 'text': ...}"),
]


class Citations(Body):
    enabled: No | None = None


class PlainSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text


class ContentSource(Body):
    type: Literal["content"]
    content: Content


def _kind_of(*kinds: str) -> Callable[[Any], str | None]:
    """The ``type`` of an object, if it is one of ``kinds``. Blocks of other media are taken for
    text, whose error says that they are not supported."""

    def kind(value: Any) -> str | None:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(found, str):
            return None
        is_other = "text" in kinds and found in OTHER_PARTS
        return found if found in kinds else "text" if is_other else None

    return kind


class DocumentBlock(Marked):
    """A document as text. It comes under its title, as uploaded documents do."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainSource, Tag("text")] | Annotated[ContentSource, Tag("content")],
        one_of(_kind_of("text", "content"), "a source of the type text or content"),
    ]
    title: ShortText | None = None
    context: Text | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        source = self.source
        said = source.data if isinstance(source, PlainSource) else text_of(source.content)
        return "\n\n".join(filter(None, (self.title, self.context, said)))


class SearchResultBlock(Marked):
    """What a search has found, as text under its title and source."""

    type: Literal["search_result"]
    source: ShortText
    title: ShortText
    content: Annotated[list[TextBlock], some(MAX_PARTS)]
    citations: Citations | None = None

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.source}\n\n{text_of(self.content)}"


TextualBlock = TextBlock | DocumentBlock | SearchResultBlock


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: ShortText
    name: ToolName
    input: Annotated[
        dict[str, Any], Field(json_schema_extra={"type": "object"}), AfterValidator(shallow)
    ]


_TEXTS = ("text", "document", "search_result")
ResultContent = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("text")]
                | Annotated[DocumentBlock, Tag("document")]
                | Annotated[SearchResultBlock, Tag("search_result")],
                one_of(_kind_of(*_TEXTS), f"a block of one of the types {', '.join(_TEXTS)}"),
            ]
        ],
        some(MAX_PARTS, least=0),
        Tag("as list"),
    ],
    one_of(text_or_list, "a string or a list of blocks like {'type': 'text', 'text': ...}"),
]


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: ResultContent | None = None
    is_error: bool | None = None

    def for_chat(self) -> Message:
        content = text_of(self.content or "")
        said = f"Error: {content}" if self.is_error else content
        return Message(role="tool", tool_call_id=self.tool_use_id, content=said)


_KINDS = (*_TEXTS, "thinking", "tool_use", "tool_result")
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    one_of(_kind_of(*_KINDS), f"a block of one of the types {', '.join(_KINDS)}"),
]
_ROLES = {
    **dict.fromkeys(("thinking", "tool_use"), "assistant"),
    **dict.fromkeys(("tool_result", "document", "search_result"), "user"),
}


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("as text")] | Annotated[list[Block], some(MAX_PARTS), Tag("as list")],
        one_of(text_or_list, "a string or a list of blocks like {'type': 'text', 'text': ...}"),
    ]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for block in self.blocks:
            if self.role != _ROLES.get(block.type, self.role):
                said = f"a {block.type} block goes with the role {_ROLES[block.type]}"
                raise goes_with("content", said)
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    def for_chat(self) -> list[Message]:
        """Results of tools are messages of their own."""
        if self.role == "assistant":
            return [_assistant(self.blocks)]
        messages: list[Message] = []
        for is_result, blocks in groupby(
            self.blocks, lambda block: isinstance(block, ToolResultBlock)
        ):
            if is_result:
                messages += [one.for_chat() for one in blocks if isinstance(one, ToolResultBlock)]
            else:
                messages.append(Message(role=self.role, content=_parts(blocks)))
        return messages

    @property
    def text(self) -> str:
        """Its text, apart from tools and reasoning."""
        return text_of([block for block in self.blocks if isinstance(block, TextualBlock)])

    @property
    def mark(self) -> CacheControl | None:
        """The last mark in this message."""
        marks = [block.cache_control for block in self.blocks if isinstance(block, Marked)]
        return next((mark for mark in reversed(marks) if mark is not None), None)


def text_of(content: str | Sequence[TextualBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _assistant(blocks: Iterable[Block]) -> Message:
    blocks = list(blocks)
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        Call(
            id=block.id,
            function=CalledFunction.of(block.name, block.input),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        role="assistant",
        content=_parts(blocks) or "",
        reasoning_content="\n".join(reasoning) or None,
        tool_calls=calls or None,
    )


def _parts(blocks: Iterable[Block]) -> list[ContentPart]:
    return [
        TextPart(type="text", text=block.text)
        for block in blocks
        if isinstance(block, TextualBlock)
    ]
