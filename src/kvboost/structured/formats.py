"""The formats that a request may ask for, as grammars of llguidance: JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

from kvboost.errors import ConfigError, StructuredOutputError
from kvboost.structured.library import library

SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as ``json.dumps`` does. If blanks were free, hardly a token would be forced, and
a model could go on writing blanks for ever."""


@runtime_checkable
class SchemaModel(Protocol):
    """A model of pydantic's: a class that knows its JSON schema."""

    def model_json_schema(self) -> dict[str, Any]: ...


class FormatOptions(TypedDict, total=False):
    """The format of an answer; at most one of these. ``schema`` is a JSON schema or a model of
    pydantic's, ``regex`` a regular expression that the whole answer matches, ``grammar`` a grammar
    in Lark's or GBNF's notation, or one that is compiled, ``choice`` the strings of which the
    answer is one."""

    schema: Mapping[str, Any] | type | None
    regex: str | None
    grammar: Any
    choice: Sequence[str] | None


FORMATS = tuple(FormatOptions.__annotations__)


def grammar_for(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The grammar of the format that a request asks for, and the option that does; None if none
    does."""
    given = [name for name in FORMATS if options.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} do not go together; give one of them")
    (name,) = given
    return _MAKERS[name](options[name]), name


def json_grammar(schema: Mapping[str, Any] | type, *, lenient: bool = False) -> str:
    """``lenient`` leaves out what cannot be enforced; else that is an error of the compiler."""
    if isinstance(schema, type):
        if not isinstance(schema, SchemaModel):
            raise ConfigError(
                f"schema={schema.__name__} must be a JSON schema or a class with "
                "model_json_schema(), as pydantic's models have"
            )
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise ConfigError(f"schema={schema!r} must be a JSON schema, such as {{'type': 'object'}}")
    return _wrapped({"json_schema": json_schema(schema, lenient=lenient)})


def json_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """``schema`` with what the compiler must know: how JSON is written."""
    own = schema.get("x-guidance")
    options = {**SEPARATORS, "lenient": lenient, **(own if isinstance(own, Mapping) else {})}
    try:
        copied: dict[str, Any] = json.loads(json.dumps({**schema, "x-guidance": options}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"schema: it is not JSON: {error}") from None
    except RecursionError:
        raise StructuredOutputError("schema", "it is nested too deeply") from None
    return copied


def regex_grammar(regex: str) -> str:
    if not isinstance(regex, str) or not regex:
        raise ConfigError(f"regex={regex!r} must be a regular expression")
    return str(library().LLMatcher.grammar_from_regex(regex))


def text_grammar(grammar: str) -> str:
    """Lark's notation, GBNF's, or a grammar that is compiled as it is."""
    if not isinstance(grammar, str):
        raise ConfigError(f"grammar={grammar!r} must be a grammar in Lark's or GBNF's notation")
    if not grammar.strip():
        raise StructuredOutputError("grammar", f"{grammar!r} has no rules")
    if grammar.startswith('{"grammars":'):
        return grammar
    try:
        return str(library().grammar_from("grammar", grammar))
    except ValueError as error:
        raise StructuredOutputError("grammar", str(error)) from None


def choice_grammar(choice: Sequence[str]) -> str:
    strings = isinstance(choice, Sequence) and not isinstance(choice, str)
    if not strings or not choice or not all(isinstance(text, str) and text for text in choice):
        raise ConfigError(f"choice={choice!r} must be several strings that are not empty")
    return _wrapped({"lark_grammar": f"start: {' | '.join(map(literal, choice))}"})


def after_reasoning(grammar: str, *, begun: bool) -> str:
    """``grammar`` for the part of an answer after the model's reasoning. ``begun``: the prompt has
    opened the reasoning; otherwise the model may leave it out."""
    first, *others = json.loads(grammar)["grammars"]
    thought = 'thought[suffix="</think>"]: /(.|\\n)*/\nBLANK: /[ \\n]{0,4}/\n'
    start = "thought BLANK @answer" if begun else '("<think>" thought BLANK)? @answer'
    outer = {"lark_grammar": f"{thought}start: {start}"}
    return json.dumps({"grammars": [outer, {**first, "name": "answer"}, *others]})


def literal(text: str) -> str:
    """``text`` as a string in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _wrapped(grammar: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [grammar]})


_MAKERS: dict[str, Callable[[Any], str]] = {
    "schema": json_grammar,
    "regex": regex_grammar,
    "grammar": text_grammar,
    "choice": choice_grammar,
}
