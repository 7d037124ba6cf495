"""Messages of Anthropic's API, and the chat messages that they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from typing_extensions import Self

from kvboost.serve.request_fields import (
    MAX_PARTS,
    Body,
    ShortText,
    Text,
    goes_with,
    one_of,
    some,
    text_or_list,
)
from kvboost.serve.request_tools import (
    OTHER_PARTS,
    Call,
    CalledFunction,
    ContentPart,
    Message,
    TextPart,
    ToolName,
    refuse_other_parts,
)


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> int:
        return 3600 if self.ttl == "1h" else 300


class Marked(Body):
    """What may be marked as the end of a beginning to keep."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    type: Annotated[Literal["text"], BeforeValidator(refuse_other_parts)]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: ShortText
    name: ToolName
    input: Annotated[dict[str, Any], Field(json_schema_extra={"type": "object"})]


Content = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[list[TextBlock], some(MAX_PARTS, least=0), Tag("as list")],
    one_of(text_or_list, "a string or a list of blocks like {'type': 'text', 'text': ...}"),
]


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: Content | None = None
    is_error: bool | None = None

    def for_chat(self) -> Message:
        content = text_of(self.content or "")
        said = f"Error: {content}" if self.is_error else content
        return Message(role="tool", tool_call_id=self.tool_use_id, content=said)


_KINDS = ("text", "thinking", "tool_use", "tool_result")


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return kind if kind in _KINDS else "text" if kind in OTHER_PARTS else None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    one_of(_block_kind, f"a block of one of the types {', '.join(_KINDS)}"),
]
_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


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
    def mark(self) -> CacheControl | None:
        """The last mark in this message."""
        marks = [block.cache_control for block in self.blocks if isinstance(block, Marked)]
        return next((mark for mark in reversed(marks) if mark is not None), None)


def text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _assistant(blocks: Iterable[Block]) -> Message:
    blocks = list(blocks)
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        Call(
            id=block.id,
            function=CalledFunction(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            ),
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
        TextPart(type="text", text=block.text) for block in blocks if isinstance(block, TextBlock)
    ]
