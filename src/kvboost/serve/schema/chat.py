"""Messages of a conversation in OpenAI's format: their parts, images, calls of tools and marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from kvboost.chat.tool_use import ToolUse
from kvboost.serve.errors import ApiError
from kvboost.serve.http.json_text import MAX_DEPTH, depth_of
from kvboost.serve.http.problems import shown
from kvboost.serve.schema import fields
from kvboost.serve.schema.formats import JsonSchema

Retention = Literal["in_memory", "in-memory", "24h"]
"""OpenAI's words. Its clients have had both spellings of the first one."""


class CacheControl(fields.Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> int:
        return 3600 if self.ttl == "1h" else 300


class Marked(fields.Body):
    """A part of a conversation that may be marked: the text up to its end is then kept."""

    cache_control: CacheControl | None = None


class Mark(NamedTuple):
    """The beginning of a conversation that is to be kept: its tools, and so many chat messages."""

    num_messages: int
    seconds: int


def marks_of(ends: Iterable[tuple[int, CacheControl | None]]) -> list[Mark]:
    """The marks among ``ends``, each after so many messages; of each lifetime the last."""
    found = sorted(Mark(number, mark.seconds) for number, mark in ends if mark is not None)
    return list({mark.seconds: mark for mark in found}.values())


_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.ASCII | re.IGNORECASE)
_SHOWN = 40


def count_image(kind: Any, info: ValidationInfo) -> Any:
    """Counts an image. Refuses it if the model cannot be given any, or not so many."""
    context = info.context
    if isinstance(context, fields.BodyContext):
        if context.max_images is None:
            raise _other_part("images are")
        context.num_images += 1
        if context.num_images > context.max_images:
            most = context.max_images
            said = f"the body has more than {most} images; at most {most} are allowed"
            raise ApiError(400, said, "invalid_image", "messages")
    return kind


def _as_data(url: str, info: ValidationInfo) -> str:
    """``url``, or the data URL of the image that was fetched from there. Notes what is to be
    fetched. Refuses addresses on hosts that the operator does not allow, which by default are
    all."""
    if _DATA_URL.match(url) is not None:
        return url
    context = info.context if isinstance(info.context, fields.BodyContext) else fields.BodyContext()
    if (image := context.fetched.get(url)) is not None:
        return image.data_url
    if context.image_hosts is None:
        raise _no_data_url(
            url, "this server fetches no addresses, unless its operator allows hosts (--image-host)"
        )
    if url not in context.to_fetch:
        context.address_bytes += len(url.encode())
        if context.address_bytes > fields.MAX_ADDRESS_BYTES:
            most = f"those of a body may have {fields.MAX_ADDRESS_BYTES:,} bytes together"
            raise fields.too_many(f"is one address too many: {most}; send data URLs")
        if (problem := context.image_hosts.problem(url)) is not None:
            raise _no_data_url(url, f"an address {problem}")
    context.to_fetch[url] += 1
    return url


def _no_data_url(url: str, why: str) -> PydanticCustomError:
    like = "must be a data URL like 'data:image/png;base64,...'"
    return fields.unsupported(f"{like}, not {url[:_SHOWN]!r}: {why}")


ImageUrl = Annotated[fields.Text, AfterValidator(_as_data)]
"""A data URL, once the images of a request have been fetched."""
Detail = Literal["auto", "low", "high", "original"]
"""Changes nothing: the model's own image processor decides how an image is scaled."""


class ImageAddress(fields.Body):
    url: ImageUrl
    detail: Detail | None = None


class ImagePart(Marked):
    """A part with an image of a message."""

    type: Annotated[Literal["image_url"], BeforeValidator(count_image)]
    image_url: ImageAddress

    @classmethod
    def of(cls, url: str) -> ImagePart:
        """A part of an image whose address has been checked."""
        address = ImageAddress.model_construct(url=url)
        return cls.model_construct(type="image_url", image_url=address)

    def for_template(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url.url}}


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(fields.Body):
    name: ToolName
    description: fields.Text | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None
    """Whether calls must keep to the whole of ``parameters``."""


class Tool(Marked):
    type: Literal["function"]
    function: Function

    def described(self) -> dict[str, Any]:
        return described_tool(**dict(self.function))


class NamedFunction(fields.Body):
    name: ToolName


class NamedTool(fields.Body):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


def choice_kind(value: Any) -> str | None:
    match value:
        case str():
            return "a word"
        case dict() | fields.Body():
            return "a tool"
        case _:
            return None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedTool, Tag("a tool")],
    fields.one_of(
        choice_kind, "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
    ),
]


def described_tool(name: str, **function: Any) -> dict[str, Any]:
    """A tool as chat templates and grammars expect it, of what is given about its function."""
    given = {field: value for field, value in function.items() if value is not None}
    return {"type": "function", "function": {"name": name, **given}}


class Named(Protocol):
    """The choice of one tool."""

    @property
    def name(self) -> str: ...


def make_use(
    tools: Sequence[Any] | None, choice: str | Named | None, parallel: bool | None
) -> ToolUse:
    """The tools and the choice of a request. ``tools`` are those of any API, each of which can be
    ``described``. Raises a validation error if it contradicts itself."""
    given = [tool.described() for tool in tools or ()]
    names = [tool["function"]["name"] for tool in given]
    if len(set(names)) < len(names):
        raise fields.goes_with("tools", "tools: two of them have the same name")
    if not given and choice not in (None, "none", "auto"):
        raise fields.goes_with("tool_choice", "tool_choice goes with tools")
    if choice is None or isinstance(choice, str):
        return ToolUse(given, choice or "auto", None, parallel is not False)
    if choice.name not in names:
        there = f"there is no tool {choice.name}; there is {', '.join(names)}"
        raise fields.goes_with("tool_choice", f"tool_choice: {there}")
    return ToolUse(given, "required", choice.name, parallel is not False)


OTHER_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images are"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio is"),
    **dict.fromkeys(("file", "input_file"), "files are"),
    "video_url": "videos are",
    "document": "documents are",
}


def _other_part(what: str) -> PydanticCustomError:
    said = f"{what} not supported by this server's model; send parts of type 'text'"
    return fields.unsupported(said)


def refuse_other_parts(kind: Any) -> Any:
    if isinstance(kind, str) and kind in OTHER_PARTS:
        raise _other_part(OTHER_PARTS[kind])
    return kind


class Thinking(fields.Body):
    """Whether the model shall think, as the APIs of several providers say it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: fields.MaxTokens | None = None
    """Changes nothing: the model ends its reasoning by itself, or at ``max_tokens``."""


class TextPart(Marked):
    type: Annotated[Literal["text"], BeforeValidator(refuse_other_parts)]
    text: fields.Text


class DocumentPart(Marked):
    """A document that was uploaded to ``/kvboost/documents``."""

    type: Literal["document"]
    document_id: fields.ShortText
    title: fields.ShortText | None = None
    """The line before the text. Default: the title that it was uploaded with."""


def _part_kind(value: Any) -> str | None:
    kind = fields.type_of(value)
    if kind in ("document", "image_url"):
        return str(kind)
    is_unknown = isinstance(kind, str) and kind != "text" and kind not in OTHER_PARTS
    return None if is_unknown else "text"


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[DocumentPart, Tag("document")]
    | Annotated[SkipJsonSchema[ImagePart], Tag("image_url")],
    fields.one_of(_part_kind, "a part of one of the types text, document"),
]
"""Images are in no schema: whether they are allowed depends on the model."""


def shallow(value: Any) -> Any:
    """Refuses arguments of calls that are nested so deeply that a chat template which indents them
    would write far more than was sent."""
    if depth_of(value) > MAX_DEPTH:
        raise ValueError(f"must not be nested deeper than {MAX_DEPTH} lists and objects")
    return value


Arguments = Annotated[
    dict[str, Any], Field(json_schema_extra={"type": "object"}), AfterValidator(shallow)
]


class CalledFunction(fields.Body):
    name: ToolName
    arguments: fields.Text
    _is_read: bool = PrivateAttr(default=False)
    _value: Any = PrivateAttr(default=None)
    """The arguments themselves: chat templates want these, not their text."""

    @classmethod
    def of(cls, name: str, value: Any, arguments: str = "", **more: Any) -> Self:
        """A call whose arguments are known, and counted and checked."""
        made = cls.model_construct(name=name, arguments=arguments, **more)
        made._is_read, made._value = True, value
        return made

    @property
    def value(self) -> Any:
        return self._value

    @model_validator(mode="after")
    def _read_arguments(self, info: ValidationInfo) -> Self:
        if self._is_read:  # pydantic checks again what becomes part of another object
            return self
        self._is_read = True
        try:
            self._value = shallow(fields.parse_inner(self.arguments or "{}", info))
        except ValueError as error:
            said = f"arguments must be JSON text, not {shown(self.arguments)}: {error}"
            raise fields.goes_with("arguments", said) from None
        return self


class Call(fields.Body):
    type: Literal["function"] = "function"
    id: fields.ShortText
    function: CalledFunction
    index: int | None = None
    """Some clients send back what a stream has sent them."""

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.value}
        return {"id": self.id, "type": "function", "function": function}


Content = Annotated[
    fields.TextOrList[fields.Text, Annotated[list[ContentPart], fields.some(fields.MAX_PARTS)]],
    fields.one_of(
        fields.text_or_list, "a string or a list of parts like {'type': 'text', 'text': ...}"
    ),
]


_ROLES = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


class Message(Marked):
    """Fields that are not supported come first: errors name the first wrong field."""

    function_call: None = None
    audio: None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[Call], fields.some(fields.MAX_CALLS, least=0)] | None = None
    tool_call_id: fields.ShortText | None = None
    reasoning_content: fields.Text | None = None
    content: Content | None = None
    name: fields.ShortText | None = None
    """Accepted, but not part of the prompt: chat templates have no place for it."""
    provider_specific_fields: dict[str, Any] | None = None
    """LiteLLM's notes on an answer, which its agents send back. They change nothing."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise fields.goes_with("content", "content is missing")
        fields.check_role(self, _ROLES)
        if self.images and self.role != "user":
            raise fields.goes_with("content", "a part with an image goes with the role user")
        return self

    @property
    def text(self) -> str:
        """Its content, without documents."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def parts(self) -> list[ContentPart]:
        """None if its content is one text."""
        return self.content if isinstance(self.content, list) else []

    @property
    def size(self) -> int:
        """Characters that were sent, about."""
        calls = [call.function.arguments for call in self.tool_calls or ()]
        urls = [part.image_url.url for part in self.images]
        return sum(map(len, (self.text, *calls, *urls, self.reasoning_content or "")))

    @property
    def mark(self) -> CacheControl | None:
        """The last mark in this message."""
        marks = [self.cache_control, *(part.cache_control for part in reversed(self.parts))]
        return next((mark for mark in marks if mark is not None), None)

    @property
    def images(self) -> list[ImagePart]:
        return [part for part in self.parts if isinstance(part, ImagePart)]

    @property
    def documents(self) -> list[DocumentPart]:
        return [part for part in self.parts if isinstance(part, DocumentPart)]

    def for_template(self, documents: Iterator[str]) -> dict[str, Any]:
        """The message as chat templates expect it: a developer is a system, and parts become the
        lines of one text, or of one before, between and after images. ``documents`` gives the texts
        of its documents, in order."""
        content = self.text if not self.parts else _joined(self.parts, documents)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        return message


def _joined(parts: Sequence[ContentPart], documents: Iterator[str]) -> str | list[dict[str, Any]]:
    """The parts of a message: one text, or if there are images, texts and images."""
    found: list[dict[str, Any]] = []
    for is_image, group in groupby(parts, lambda part: isinstance(part, ImagePart)):
        if is_image:
            found += [part.for_template() for part in group if isinstance(part, ImagePart)]
            continue
        lines = [part.text if isinstance(part, TextPart) else next(documents) for part in group]
        found.append({"type": "text", "text": "\n".join(lines)})
    return found[0]["text"] if len(found) == 1 and found[0]["type"] == "text" else found
