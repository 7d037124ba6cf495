"""The field ``context_management`` of requests: its schema, and the check of its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from kvboost.chat.context_edits import THINKING, TOOL_USES, read_edits
from kvboost.errors import ConfigError
from kvboost.serve.request_fields import goes_with


def _object(required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """An object without other fields. One that is not required may be null."""
    fields = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return schema | ({"required": list(required)} if required else {})


def _amount(least: int, *types: str) -> dict[str, Any]:
    value = {"type": "integer", "minimum": least}
    return _object(("type", "value"), type={"enum": list(types)}, value=value)


_NAMES = {"type": "array", "items": {"type": "string"}}
_ALL = [{"const": "all"}, _object(("type",), type={"const": "all"})]
_TOOL_USES = _object(
    ("type",),
    type={"const": TOOL_USES},
    trigger=_amount(1, "input_tokens", "tool_uses"),
    keep=_amount(0, "tool_uses"),
    clear_at_least=_amount(0, "input_tokens"),
    exclude_tools=_NAMES,
    clear_tool_inputs={"anyOf": [{"type": "boolean"}, _NAMES]},
)
_THINKING = _object(
    ("type",),
    type={"const": THINKING},
    keep={"anyOf": [_amount(1, "thinking_turns"), *_ALL]},
)
_EDITS = {"type": "array", "items": {"anyOf": [_THINKING, _TOOL_USES]}, "maxItems": 2}


def _check(given: dict[str, Any]) -> dict[str, Any]:
    """Raises a validation error that names the place of a mistake, such as ``edits[0].keep``."""
    try:
        read_edits(given)
    except ConfigError as error:
        said = str(error).removeprefix("context_management: ")
        raise goes_with(said.partition("=")[0], said) from None
    return given


ContextManagement = Annotated[
    dict[str, Any], Field(json_schema_extra=_object(edits=_EDITS)), AfterValidator(_check)
]
"""Edits of a conversation before it is read. As in all objects of ours, an unknown field is a
mistake."""
