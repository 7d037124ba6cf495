"""The types of fields in request bodies, each with its limits, and the base of all bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvboost.config import LIMIT_DRAFTED, SPECULATE

MAX_FIELDS = 64
"""Fields of one object, known or not."""
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
MAX_STOPS = 4
MAX_BIASES = 1024
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


def at_most(most: int) -> BeforeValidator:
    """Refuses a larger object before any of its items is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_many_items",
                "has {count} entries; at most {most} are allowed",
                {"count": f"{len(value):,}", "most": most},
            )
        return value

    return BeforeValidator(check)


def one_of(kind: Callable[[Any], str | None], said: str) -> Discriminator:
    """For unions: ``kind`` names the branch of a value. If it names none, the error says what is
    allowed."""
    return Discriminator(
        kind,
        custom_error_type="one_of",
        custom_error_message=f"must be {said}",
    )


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
    dict[
        Annotated[str, Field(pattern=BIASED_ID)],
        Annotated[float, Field(ge=-100.0, le=100.0)],
    ],
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
MaxTokens = Annotated[int, Field(ge=1, lt=2**31), WHOLE]
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
TopK = Annotated[int, Field(ge=-1, lt=2**31), WHOLE]
"""0 and -1 turn it off."""
Seed = Annotated[int, WHOLE]
"""Any whole number: readers that hold numbers in a double cannot keep a limit of 64 bits."""


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


def single_prompt_kind(value: Any) -> str | None:
    kind = prompt_kind(value)
    return kind if kind in ("as text", "as ids") else None


def _never(value: bool) -> bool:
    if value:
        raise PydanticCustomError("unsupported", "true is not supported by this server")
    return value


No = Annotated[bool, AfterValidator(_never), Field(json_schema_extra={"const": False})]
"""A switch that a request may name but not turn on."""


def goes_with(param: str, message: str) -> PydanticCustomError:
    """An object whose fields are right alone but not together; ``param`` names one of them."""
    return PydanticCustomError("goes_with", message, {"param": param})


class Body(BaseModel):
    """Unknown fields are refused, and no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        """There would be one error for each unknown field."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            unknown = next(name for name in value if name not in cls.model_fields)
            raise PydanticCustomError(
                "too_many_fields",
                "has {count} fields, and {unknown} is not a field that this server knows",
                {"count": f"{len(value):,}", "unknown": repr(unknown[:80])},
            )
        return value
