"""Formats as grammars."""

from __future__ import annotations

import json

import pytest

from kvboost.errors import ConfigError
from kvboost.structured.formats import grammar_for, json_grammar


def test_no_format_is_no_grammar() -> None:
    assert grammar_for({"temperature": 1.0, "schema": None}) is None


def test_a_schema_is_written_as_json_dumps_writes() -> None:
    (grammar,) = json.loads(json_grammar({"type": "object"}))["grammars"]
    assert grammar["json_schema"]["type"] == "object"
    assert grammar["json_schema"]["x-guidance"]["key_separator"] == ": "
    assert not grammar["json_schema"]["x-guidance"]["lenient"]


def test_a_schema_may_choose_how_it_is_written() -> None:
    schema = {"type": "object", "x-guidance": {"key_separator": ":"}}
    (grammar,) = json.loads(json_grammar(schema))["grammars"]
    options = grammar["json_schema"]["x-guidance"]
    assert options["key_separator"] == ":" and options["item_separator"] == ", "


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schema": 3}, "schema=3 must be a JSON schema"),
        ({"schema": int}, "schema=int must be a JSON schema or a class with model_json_schema"),
        ({"schema": {"enum": [object()]}}, "schema: it is not JSON"),
        ({"regex": ""}, "regex='' must be a regular expression"),
        ({"grammar": " "}, "grammar cannot be enforced: ' ' has no rules"),
        ({"grammar": "hello world"}, r"grammar cannot be enforced: .*GBNF"),
        ({"grammar": 3}, "grammar=3 must be a grammar"),
        ({"choice": []}, r"choice=\[\] must be several strings"),
        ({"choice": "yes"}, "choice='yes' must be several strings"),
        ({"choice": ["yes", ""]}, "must be several strings that are not empty"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice do not go together"),
    ],
)
def test_a_wrong_format_says_what_is_wrong(options, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grammar_for(options)
