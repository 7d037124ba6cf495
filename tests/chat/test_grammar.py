"""Grammars of calls, on random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from kvboost import KVBoost, StructuredOutputError
from kvboost.chat.grammar import calls_or, forced_calls, free_calls
from kvboost.chat.parser import TextParser, collect
from kvboost.chat.styles import BARE, TAGGED, CallStyle
from kvboost.results import ParsedAnswer
from kvboost.structured.formats import choice_grammar
from support.tiny import EOS, make_engine, tiny_model

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("weather", parameters=WEATHER, strict=True), tool("now")]


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine:
        yield engine


def parse(text: str, style: CallStyle) -> ParsedAnswer:
    parser = TextParser(style, thinks=False, names=("weather", "now"))
    return collect([*parser.feed(text), *parser.finish()])


def accepts(engine: KVBoost, grammar: str, text: str) -> bool:
    """Whether ``text`` is an answer in ``grammar``."""
    compiled = engine.compile_format({"grammar": grammar})
    assert compiled is not None
    constraint = compiled.start()
    for token in [*engine.encode(text), EOS]:
        if not constraint.allowed()[token // 8] >> token % 8 & 1:
            return False
        constraint.accept(token)
    return True


@pytest.mark.parametrize("style", [TAGGED, BARE])
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_calls(engine: KVBoost, style: CallStyle, parallel: bool) -> None:
    grammar = forced_calls(TOOLS, style, parallel=parallel)
    names = set()
    for seed in range(6):
        answer = engine.generate("x", 400, grammar=grammar, temperature=1.5, seed=seed)
        found = parse(answer.output_text, style)
        assert answer.finish_reason == "stop" and not found.content
        assert len(found.tool_calls) >= 1 and (parallel or len(found.tool_calls) == 1)
        for call in found.tool_calls:
            names.add(call.name)
            if call.name == "weather":
                jsonschema_rs.validate(WEATHER, json.loads(call.arguments))
            else:
                assert json.loads(call.arguments) == {}
    assert names == {"weather", "now"}


GOOD = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
BAD = '{"name": "weather", "arguments": {"city": "Rome", "days": 30}}'


def test_free_text_may_call_strictly(engine: KVBoost) -> None:
    grammar = free_calls(TOOLS, TAGGED, parallel=True)
    call = f"<tool_call>\n{GOOD}\n</tool_call>"
    for text in ("Hello <b>", call, f"I look.\n{call}\n{call} So", "<tool_call"):
        assert accepts(engine, grammar, text)
    assert not accepts(engine, grammar, f"<tool_call>\n{BAD}\n</tool_call>")
    assert not accepts(engine, grammar, '<tool_call>\n{"name": "rain"')


def test_one_call_ends_the_answer(engine: KVBoost) -> None:
    grammar = free_calls(TOOLS, TAGGED, parallel=False)
    call = f"<tool_call>\n{GOOD}\n</tool_call>"
    assert accepts(engine, grammar, f"I look. {call}") and accepts(engine, grammar, "No.")
    assert not accepts(engine, grammar, f"{call}\n{call}")


def test_free_calls_of_llama(engine: KVBoost) -> None:
    grammar = free_calls(TOOLS, BARE, parallel=True)
    good, bad = (call.replace("arguments", "parameters") for call in (GOOD, BAD))
    for text in ("Hello {", good, f"{good}; {good}"):
        assert accepts(engine, grammar, text)
    assert not accepts(engine, grammar, bad)


def test_calls_or_another_format(engine: KVBoost) -> None:
    grammar = calls_or(choice_grammar(["yes", "no"]), TOOLS, TAGGED, parallel=False)
    assert accepts(engine, grammar, "yes")
    assert accepts(engine, grammar, f"<tool_call>\n{GOOD}\n</tool_call>")
    assert not accepts(engine, grammar, "maybe")


def test_only_a_strict_tool_is_refused_for_its_schema(engine: KVBoost) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    lenient = forced_calls([tool("f", parameters=schema)], TAGGED, parallel=False)
    assert accepts(
        engine, lenient, '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    )
    strict = forced_calls([tool("f", parameters=schema, strict=True)], TAGGED, parallel=False)
    with pytest.raises(StructuredOutputError, match="uniqueItems"):
        engine.compile_format({"grammar": strict})
