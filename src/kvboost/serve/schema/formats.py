"""The formats that a request may ask for: OpenAI's ``response_format``, and vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from kvboost.serve.http.json_text import MAX_DEPTH, depth_of
from kvboost.serve.schema import fields

MAX_GRAMMAR = 256 * 1024
"""Characters of a regular expression or grammar."""
MAX_SCHEMA_VALUES = 8192
"""JSON values in one schema."""
MAX_PROPERTIES = 1024
"""Properties of one object in a schema. So many compile in half a second, twice as many in two."""


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    waiting: list[Any] = [schema]
    seen = 0
    while waiting:
        value = waiting.pop()
        inside = list(value.values()) if isinstance(value, dict) else value
        seen += len(inside)
        properties = value.get("properties") if isinstance(value, dict) else None
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            most = f"at most {MAX_PROPERTIES:,} are allowed"
            raise fields.too_many(f"has an object of {len(properties):,} properties; {most}")
        if seen > MAX_SCHEMA_VALUES:
            said = f"has more than {MAX_SCHEMA_VALUES:,} JSON values"
            raise fields.too_many(f"{said}; make the schema smaller")
        waiting += [one for one in inside if isinstance(one, (dict, list))]
    if depth_of(schema) > MAX_DEPTH:
        said = f"is nested deeper than {MAX_DEPTH} lists and objects"
        raise fields.too_many(f"{said}; make the schema flatter")
    return schema


JsonSchema = Annotated[
    dict[str, Any], Field(json_schema_extra={"type": "object"}), AfterValidator(_bounded)
]


def _parsed(value: Any, info: ValidationInfo) -> Any:
    """vLLM's clients may send a schema as text."""
    if not isinstance(value, str):
        return value
    try:
        return fields.parse_inner(value, info)
    except ValueError as error:
        said = {"error": str(error)}
        raise PydanticCustomError("not_json", "must be a JSON schema: {error}", said) from None


SchemaOrText = Annotated[JsonSchema, BeforeValidator(_parsed)]
GrammarText = Annotated[fields.SomeText, Field(max_length=MAX_GRAMMAR)]
Choices = Annotated[list[fields.SomeText], fields.some(fields.MAX_CHOICES)]


class TextFormat(fields.Body):
    type: Literal["text"]


class JsonObjectFormat(fields.Body):
    type: Literal["json_object"]


class SchemaDetails(fields.Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] = "answer"
    description: fields.Text | None = None
    schema_: JsonSchema = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    """Changes nothing: answers always keep to the schema."""


class JsonSchemaFormat(fields.Body):
    type: Literal["json_schema"]
    json_schema: SchemaDetails


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


_BY_NAME = {"regex": "regex", "choice": "choice", "grammar": "grammar"}
_OPTIONS = {
    "guided_json": "schema",
    **{f"guided_{name}": name for name in _BY_NAME},
    "json_schema": "schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""The fields that ask for a format, and the option of the engine that each is."""
_ATTRIBUTES = {"json": "json_"}


class StructuredOutputs(fields.Body):
    """vLLM's object; one of its fields."""

    # A field of the name json would hide a method of pydantic's.
    json_: SchemaOrText | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    def formats(self) -> dict[str, dict[str, Any]]:
        given = _given(self, {"json": "schema", **_BY_NAME}, "structured_outputs.")
        if self.json_object:
            given["structured_outputs.json_object"] = {"schema": {"type": "object"}}
        return given


class Formats(fields.Body):
    """The fields of vLLM, SGLang and llama.cpp. At most one format may be given."""

    guided_json: SchemaOrText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    # The names of SGLang and llama.cpp.
    json_schema: SchemaOrText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: GrammarText | None = None

    def formats(self) -> dict[str, dict[str, Any]]:
        """The formats that are asked for, by field, as options of the engine."""
        own = _given(self, _OPTIONS)
        return own if self.structured_outputs is None else own | self.structured_outputs.formats()

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        given = list(self.formats())
        if len(given) > 1:
            raise fields.goes_with(
                given[1], f"{given[1]} does not go with {given[0]}: give one format"
            )
        return self


def response_options(chosen: Any) -> dict[str, dict[str, Any]]:
    """``response_format`` as options of the engine, by field."""
    match chosen:
        case JsonObjectFormat():
            return {"response_format": {"schema": {"type": "object"}}}
        case JsonSchemaFormat():
            return {"response_format": {"schema": chosen.json_schema.schema_}}
        case _:
            return {}


def _given(
    body: fields.Body, options: dict[str, str], prefix: str = ""
) -> dict[str, dict[str, Any]]:
    """Those of ``options`` whose field is given, by field."""
    values = {field: getattr(body, _ATTRIBUTES.get(field, field)) for field in options}
    return {
        f"{prefix}{field}": {options[field]: value}
        for field, value in values.items()
        if value is not None
    }
