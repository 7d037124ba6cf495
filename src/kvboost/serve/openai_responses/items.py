"""Items of a conversation in the Responses API, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from kvboost.serve.http.json_text import JsonBudget, parse_json
from kvboost.serve.schema import chat, fields

Status = Literal["in_progress", "completed", "incomplete"]
Nothing = Annotated[list[Any], Field(max_length=0)]


class ItemText(fields.Body):
    """A part of a message. What a response has sent may be sent back."""

    type: Annotated[
        Literal["input_text", "output_text", "text"], BeforeValidator(chat.refuse_other_parts)
    ]
    text: fields.Text
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class ItemImage(fields.Body):
    """An image in a message."""

    type: Annotated[Literal["input_image"], BeforeValidator(chat.count_image)]
    image_url: chat.ImageUrl
    detail: chat.Detail | None = None
    file_id: None = None


def _part_kind(value: Any) -> str:
    return "image" if fields.type_of(value) == "input_image" else "text"


_LIKE = fields.one_of(
    fields.text_or_list, "a string or a list of parts like {'type': 'input_text', 'text': ...}"
)
Content = Annotated[
    fields.TextOrList[fields.Text, Annotated[list[ItemText], fields.some(fields.MAX_PARTS)]], _LIKE
]
ItemPart = Annotated[
    Annotated[ItemText, Tag("text")] | Annotated[SkipJsonSchema[ItemImage], Tag("image")],
    Discriminator(_part_kind),
]
MessageContent = Annotated[
    fields.TextOrList[fields.Text, Annotated[list[ItemPart], fields.some(fields.MAX_PARTS)]], _LIKE
]


class MessageItem(fields.Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: MessageContent
    id: fields.ShortText | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        parts = [] if isinstance(self.content, str) else self.content
        if self.role != "user" and any(isinstance(part, ItemImage) for part in parts):
            raise fields.goes_with(
                "content", "a part of the type input_image goes with the role user"
            )
        return self


class CallItem(chat.CalledFunction):
    type: Literal["function_call"]
    call_id: fields.ShortText
    id: fields.ShortText | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None
    is_async: None = Field(default=None, alias="async")


class ResultItem(fields.Body):
    """The result of a call of a tool."""

    type: Literal["function_call_output"]
    call_id: fields.ShortText
    output: Content
    id: fields.ShortText | None = None
    status: Status | None = None
    caller: None = None
    name: fields.ShortText | None = None
    namespace: None = None


class ReasoningText(fields.Body):
    type: Literal["reasoning_text"]
    text: fields.Text


class ReasoningItem(fields.Body):
    type: Literal["reasoning"]
    summary: Nothing | None = None
    content: Annotated[list[ReasoningText], fields.some(fields.MAX_PARTS, least=0)] | None = None
    id: fields.ShortText | None = None
    status: Status | None = None
    encrypted_content: None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    kind = value.get("type") or "message"
    return kind if kind in _KINDS else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    fields.one_of(_item_kind, f"an item of one of the types {', '.join(_KINDS)}"),
]


def messages_of(
    items: Iterable[Item], make_message: Callable[..., chat.Message] = chat.Message
) -> list[chat.Message]:
    """The chat messages that ``items`` are. Consecutive items of the assistant (reasoning, text,
    calls) are one message. ``make_message`` makes each of them; the default checks the limits of
    requests."""
    messages: list[chat.Message] = []
    turn: list[Item] = []
    for item in items:
        if turn and not _continues(turn, item):
            messages.append(_assistant(turn, make_message))
            turn = []
        match item:
            case ResultItem():
                said = {"name": item.name, "content": _content(item.output)}
                messages.append(make_message(role="tool", tool_call_id=item.call_id, **said))
            case MessageItem() if item.role != "assistant":
                messages.append(make_message(role=item.role, content=_content(item.content)))
            case _:
                turn.append(item)
    return [*messages, _assistant(turn, make_message)] if turn else messages


def messages_of_output(output: Iterable[dict[str, Any]]) -> list[chat.Message]:
    """The same for the output of a response. The model wrote it, so the limits of requests do not
    hold. A call whose arguments cannot be read, as if it was cut off, is left out."""
    items = [item for one in output if (item := _output_item(one)) is not None]
    return messages_of(items, chat.Message.model_construct)


def _output_item(given: dict[str, Any]) -> Item | None:
    match given["type"]:
        case "reasoning":
            thoughts = [ReasoningText.model_construct(**part) for part in given["content"]]
            return ReasoningItem.model_construct(type="reasoning", content=thoughts)
        case "message":
            said = [ItemText.model_construct(**part) for part in given["content"]]
            return MessageItem.model_construct(role="assistant", content=said)
    if given["status"] == "incomplete":
        return None
    arguments = given["arguments"]
    try:
        JsonBudget().take(arguments.encode())
        value = chat.shallow(parse_json(arguments.encode() or b"{}"))
    except ValueError:
        return None
    return CallItem.of(
        given["name"], value, arguments, type="function_call", call_id=given["call_id"]
    )


def input_items(messages: Sequence[chat.Message]) -> list[dict[str, Any]]:
    """The items that ``messages`` are. Each has an id that depends on its place."""
    items: list[dict[str, Any]] = []

    def add(kind: str, prefix: str, **fields: Any) -> None:
        number = f"{prefix}_{len(items)}"
        items.append({"id": number, "type": kind, "status": "completed", **fields})

    for message in messages:
        if message.role == "tool":
            call_id, text = message.tool_call_id or "", message.text
            add("function_call_output", "fco", call_id=call_id, output=text)
            continue
        if message.reasoning_content:
            content = [{"type": "reasoning_text", "text": message.reasoning_content}]
            add("reasoning", "rs", summary=[], content=content)
        if message.images:
            content = [_input_part(part) for part in message.content or ()]
            add("message", "msg", role=message.role, content=content)
        elif message.text:
            part = "output_text" if message.role == "assistant" else "input_text"
            content = [{"type": part, "text": message.text}]
            add("message", "msg", role=message.role, content=content)
        for call in message.tool_calls or ():
            said = {"name": call.function.name, "arguments": call.function.arguments}
            add("function_call", "fc", call_id=call.id, **said)
    return items


_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


def _continues(turn: Sequence[Item], item: Item) -> bool:
    """Whether ``item`` belongs to the assistant's message that ``turn`` has begun: there are
    reasoning, text and calls in this order."""
    if isinstance(item, ResultItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
        return False
    before, after = _ORDER[turn[-1].type], _ORDER[item.type]
    return before < after or before == after == _ORDER["function_call"]


def _assistant(turn: Sequence[Item], make_message: Callable[..., chat.Message]) -> chat.Message:
    content: str | list[chat.ContentPart] = ""
    reasoning, calls = "", []
    for item in turn:
        match item:
            case ReasoningItem():
                reasoning = "\n".join(part.text for part in item.content or ())
            case MessageItem():
                content = _content(item.content)
            case CallItem():
                function = chat.CalledFunction.of(item.name, item.value, item.arguments)
                calls.append(chat.Call(id=item.call_id, function=function))
    return make_message(
        role="assistant",
        content=content,
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )


def _content(content: str | Sequence[ItemText | ItemImage]) -> str | list[chat.ContentPart]:
    if isinstance(content, str):
        return content
    return [
        chat.ImagePart.of(part.image_url)
        if isinstance(part, ItemImage)
        else chat.TextPart(type="text", text=part.text)
        for part in content
    ]


def _input_part(part: Any) -> dict[str, Any]:
    """A part of a message of the user's, as it was sent."""
    if isinstance(part, chat.ImagePart):
        return {"type": "input_image", "image_url": part.image_url.url, "detail": "auto"}
    return {"type": "input_text", "text": part.text}
