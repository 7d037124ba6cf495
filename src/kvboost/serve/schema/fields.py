"""The types of fields in request bodies, each with its limits, and the base of all bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvboost.config import LIMIT_DRAFTED, SPECULATE
from kvboost.serve.http.json_text import JsonBudget, parse_json

if TYPE_CHECKING:
    from kvboost.serve.images.addresses import ImageHosts
    from kvboost.serve.images.fetcher import FetchedImage

MAX_UNKNOWN = 64
"""Unknown fields of one object."""
MAX_MESSAGES = 8192
MAX_PARTS = 4096
"""Parts of one message."""
MAX_TOKEN_IDS = 256 * 1024
"""Token ids of one prompt."""
MAX_N = 8
MAX_PROMPTS = 32
MAX_DOCUMENTS = 256
MAX_INPUTS = 2048
"""Texts of one request for embeddings."""
MAX_STOPS = 64
MAX_WORDS = 1024
"""Words or tokens that end an answer, or that it must not have."""
MAX_BIASES = 1024
MAX_ADDRESS_BYTES = 32 * 1024
"""Of the addresses of images in one body, each counted once: to check them takes 25 ms at most."""
MAX_METADATA = 16
MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls of tools in one message."""
MAX_CHOICES = 1024
"""Strings of ``guided_choice``."""
MAX_SEED = 2**63 - 1
"""Larger seeds start again at 0."""


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair") from None
    return text


def _whole(value: Any) -> Any:
    """JSON has one kind of number, so 1.0 is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def some(most: int, least: int = 1) -> Any:
    """A list of ``least`` to ``most`` items, refused at the first wrong one."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def too_many(said: str) -> PydanticCustomError:
    """The error for an object or list that has more than it may have."""
    return PydanticCustomError("too_many", "{said}", {"said": said})


def unsupported(said: str) -> PydanticCustomError:
    """The error for something that this server cannot do."""
    return PydanticCustomError("unsupported", "{said}", {"said": said})


def at_most(most: int) -> BeforeValidator:
    """A validator that refuses an object with more entries before any of them is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise too_many(f"has {len(value):,} entries; at most {most} are allowed")
        return value

    return BeforeValidator(check)


def one_of(kind: Callable[[Any], str | None], said: str) -> Discriminator:
    """For unions: ``kind`` names the branch of a value; if none, the error says what is allowed."""
    return Discriminator(kind, custom_error_type="one_of", custom_error_message=f"must be {said}")


S = TypeVar("S")
T = TypeVar("T")
TextOrList = Annotated[S, Tag("as text")] | Annotated[T, Tag("as list")]
"""A union for ``one_of(text_or_list, ...)``."""
WHOLE = BeforeValidator(_whole)
Text = Annotated[str, AfterValidator(_unicode)]
SomeText = Annotated[str, Field(min_length=1), AfterValidator(_unicode)]
ShortText = Annotated[str, Field(max_length=512), AfterValidator(_unicode)]
TOKEN_ID = "Token id"
BIASED_ID = r"^[0-9]{1,9}$"
TokenId = Annotated[int, Field(ge=0, lt=2**31, title=TOKEN_ID), WHOLE]
TokenIds = Annotated[list[TokenId], some(MAX_TOKEN_IDS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=BIASED_ID)], Annotated[float, Field(ge=-100.0, le=100.0)]],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
    at_most(MAX_BIASES),
]

Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], ShortText],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA),
]

TemplateOptions = Annotated[
    dict[Annotated[Text, Field(max_length=64)], str | bool | int | float | None],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA),
]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model shall think."""
MaxTokens = Annotated[int, Field(ge=1, lt=2**31), WHOLE]
Truncate = Annotated[int, Field(ge=-1, lt=2**31), WHOLE]
"""Tokens to which a text is cut; -1: as many as the model takes."""
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
TopK = Annotated[int, Field(ge=-1, lt=2**31), WHOLE]
"""0 and -1 turn it off."""
Seed = Annotated[int, WHOLE]
"""Any whole number: readers that hold numbers in a double cannot keep a limit of 64 bits."""
MAX_TTL = 30 * 24 * 3600.0
"""Seconds for which anything may be pinned over HTTP, unless it has no end."""
Ttl = Annotated[float, Field(gt=0.0, le=MAX_TTL)]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
Logprobs = Annotated[int, Field(ge=0, le=20), WHOLE]


def _speculate_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "as text" if value in SPECULATE else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "as number" if is_number else None


Speculate = Annotated[
    Annotated[Literal["auto", "off"], Tag("as text")]
    | Annotated[int, Field(ge=1, le=LIMIT_DRAFTED), WHOLE, Tag("as number")],
    one_of(_speculate_kind, f"'auto', 'off' or a number from 1 to {LIMIT_DRAFTED}"),
]


def has(body: Any, name: str) -> bool:
    """Whether an object gives a field: one that is null is not given."""
    return isinstance(body, dict) and body.get(name) is not None


def one_field(said: str, models: Mapping[str, type[BaseModel]]) -> Discriminator:
    """For unions of objects: an object gives just one of the fields that ``models`` names, and is
    of the branch with that tag."""

    def kind(body: Any) -> str | None:
        given = [
            name for name, model in models.items() if isinstance(body, model) or has(body, name)
        ]
        return given[0] if len(given) == 1 else None

    return one_of(kind, said)


def type_of(value: Any) -> Any:
    """The ``type`` of an object, checked or not; None if it is none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def text_or_list(value: Any) -> str | None:
    match value:
        case str():
            return "as text"
        case list():
            return "as list"
        case _:
            return None


def stop_kind(value: Any) -> str | None:
    return None if value == "" else text_or_list(value)


def prompt_kind(value: Any) -> str | None:
    match value:
        case [str(), *_]:
            return "as texts"
        case [int() | float(), *_]:
            return "as ids"
        case [list(), *_]:
            return "as lists of ids"
        case str() if value:
            return "as text"
        case _:
            return None


def several_prompts(most: int) -> Discriminator:
    """For the union of a text, token ids, and lists of up to ``most`` of either."""
    said = f"a string, token ids, or a list of up to {most} of either; none of them empty"
    return one_of(prompt_kind, said)


def as_prompts(value: Any) -> list[str] | list[list[int]]:
    """The prompts of such a union, even if there is only one."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


def single_prompt_kind(value: Any) -> str | None:
    kind = prompt_kind(value)
    return kind if kind in ("as text", "as ids") else None


def _never(value: bool) -> bool:
    if value:
        raise unsupported("true is not supported by this server")
    return value


No = Annotated[bool, AfterValidator(_never), Field(json_schema_extra={"const": False})]
"""A switch that a request may name but not turn on."""


def goes_with(param: str, message: str) -> PydanticCustomError:
    """An object whose fields are right alone but not together; ``param`` names one of them."""
    return PydanticCustomError("goes_with", message, {"param": param})


def check_role(body: Any, roles: Mapping[str, str]) -> None:
    """Refuses a message with a field of ``roles`` that goes with another role than its own."""
    for name, role in roles.items():
        if getattr(body, name) and body.role != role:
            raise goes_with(name, f"{name} goes with the role {role}")


@dataclass
class BodyContext:
    """The context of pydantic's validation: what the checks of a body need, and what they find
    out."""

    strict: bool = False
    """Whether unknown fields are refused."""
    ignored: list[str] = field(default_factory=list)
    """The unknown fields that were left out, each once."""
    budget: JsonBudget = field(default_factory=JsonBudget)
    max_images: int | None = None
    """The most images of a prompt; None if the model cannot be given any."""
    image_hosts: ImageHosts | None = None
    """The hosts that images may be fetched from, if there are any."""
    fetched: Mapping[str, FetchedImage] = field(default_factory=dict)
    """Images by their address. Their data URLs take its place."""
    to_fetch: Counter[str] = field(default_factory=Counter)
    """How often each address occurs whose image is not there yet."""
    address_bytes: int = 0
    """Of these addresses, each counted once."""
    num_images: int = 0

    def leave_out(self, given: dict[str, Any], known: frozenset[str]) -> None:
        """Removes the fields that are not ``known``, and notes them, unless it is strict."""
        unknown = [] if self.strict else [name for name in given if name not in known]
        for name in unknown:
            del given[name]
            if name not in self.ignored:
                self.ignored.append(name)


def parse_inner(text: str, info: ValidationInfo) -> Any:
    """The value of JSON text inside a body, which counts like the rest of the body. Raises
    JsonTextError if it is none, or too much."""
    given = text.encode()
    if isinstance(info.context, BodyContext):
        info.context.budget.take(given)
    return parse_json(given)


class Body(BaseModel):
    """An object in a request. A field that is null counts as not given. Unknown fields are left
    out and noted, or refused if the server is strict. No value is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    leaves_out_unknown: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _take_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls._known_fields()
        if len(value.keys() - known) > MAX_UNKNOWN:  # each would be an error or a note
            unknown = next(name for name in value if name not in known)
            named = f"{unknown[:80]!r} is not a field that this server knows"
            raise too_many(f"has {len(value):,} fields, and {named}")
        given = {name: one for name, one in value.items() if one is not None}
        if cls.leaves_out_unknown and isinstance(info.context, BodyContext):
            info.context.leave_out(given, known)
        return given

    @classmethod
    @cache
    def _known_fields(cls) -> frozenset[str]:
        return frozenset(found.alias or name for name, found in cls.model_fields.items())


class OwnBody(Body):
    """An object of an API that is ours alone: an unknown field is a mistake, and always refused."""

    leaves_out_unknown = False
