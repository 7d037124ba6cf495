"""Answers are split into the same parts, however they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.chat.parser import OneCall, TextParser, collect
from kvboost.chat.styles import BARE, TAGGED, CallStyle
from kvboost.results import ParsedAnswer, ToolCall

NAMES = ("weather", "now")


def parse(
    text: str, calls: CallStyle | None = TAGGED, *, cuts: list[int] | None = None, **options: bool
) -> ParsedAnswer:
    parser = TextParser(calls, **{"thinks": True, **options}, names=NAMES)
    places = [0, *sorted(cuts or []), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return collect([*parts, *parser.finish()])


ROME = '{"name": "weather", "arguments": {"city": "Rome", "days": [1, {"a": "}</tool_call>"}]}}'
ROME_ARGUMENTS = '{"city": "Rome", "days": [1, {"a": "}</tool_call>"}]}'
CASES = {
    "plain": ("Hello <b> there.\n", ParsedAnswer("Hello <b> there.")),
    "reasoning": (
        "<think>\nIs it? <tool_call>\n</think>\n\nYes.",
        ParsedAnswer("Yes.", "Is it? <tool_call>"),
    ),
    "one call": (
        f"<tool_call>\n{ROME}\n</tool_call>",
        ParsedAnswer("", "", (ToolCall("weather", ROME_ARGUMENTS),)),
    ),
    "a call whose closing tag is cut off": (
        f"<tool_call>\n{ROME}\n</tool",
        ParsedAnswer("", "", (ToolCall("weather", ROME_ARGUMENTS),)),
    ),
    "all of it": (
        f"<think>hm</think>I look.\n<tool_call>{ROME}</tool_call>\n<tool_call>\n"
        '{"arguments": {"x": 1}, "name": "now"}\n</tool_call>\nDone',
        ParsedAnswer(
            "I look.\nDone",
            "hm",
            (ToolCall("weather", ROME_ARGUMENTS), ToolCall("now", '{"x": 1}')),
        ),
    ),
    "a list, as SmolLM writes": (
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now"}]</tool_call>',
        ParsedAnswer("", "", (ToolCall("now", "{}"), ToolCall("now", "{}"))),
    ),
    "two calls in one tag": (
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"a": 1}}\n'
        "</tool_call>",
        ParsedAnswer("", "", (ToolCall("now", "{}"), ToolCall("now", '{"a": 1}'))),
    ),
    "arguments as text": (
        '<tool_call>{"function": {"name": "now", "arguments": "{\\"a\\": 1}"}}</tool_call>',
        ParsedAnswer("", "", (ToolCall("now", '{"a": 1}'),)),
    ),
    "not JSON": (
        "<tool_call>\nweather in Rome\n</tool_call>",
        ParsedAnswer("<tool_call>\nweather in Rome\n</tool_call>"),
    ),
    "JSON but no call": (
        '<tool_call>{"city": "Rome"}</tool_call> So',
        ParsedAnswer('<tool_call>\n{"city": "Rome"}\n</tool_call> So'),
    ),
    "cut off in the arguments": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro',
        ParsedAnswer("", "", (ToolCall("weather", '{"city": "Ro'),)),
    ),
    "a name that is not JSON": (
        '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>',
        ParsedAnswer('<tool_call>\n{"name": "a\\q", "arguments": {}}\n</tool_call>'),
    ),
    "ended before": (
        'Hi <tool_call>\n{"name": "weat',
        ParsedAnswer('Hi\n<tool_call>\n{"name": "weat'),
    ),
    "ended in a mark": ("Hi <tool_", ParsedAnswer("Hi <tool_")),
    "without tags": (
        '{"name": "weather", "arguments": {"city": "Rome"}}',
        ParsedAnswer("", "", (ToolCall("weather", '{"city": "Rome"}'),)),
    ),
    "several without tags": (
        '{"name": "now", "arguments": {}}\n{"name": "weather", "arguments": {"city": "Rome"}}\n',
        ParsedAnswer("", "", (ToolCall("now", "{}"), ToolCall("weather", '{"city": "Rome"}'))),
    ),
    "in a code block": (
        '```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```',
        ParsedAnswer("", "", (ToolCall("weather", '{"city": "Rome"}'),)),
    ),
    "in a code block, and text": (
        '```json\n{"name": "now", "arguments": {}}\n```\nThat is it.',
        ParsedAnswer("That is it.", "", (ToolCall("now", "{}"),)),
    ),
    "JSON that the user asked for": (
        '{"name": "Ann", "arguments": ["a"]}',
        ParsedAnswer('{"name": "Ann", "arguments": ["a"]}'),
    ),
    "other JSON in a code block": (
        '```json\n{"city": "Rome"}\n```\nDone.',
        ParsedAnswer('```json\n{"city": "Rome"}\n```\nDone.'),
    ),
    "code": ("```python\nprint({})\n```", ParsedAnswer("```python\nprint({})\n```")),
}
CUT = {
    "in a call": ('Hi <tool_call>\n{"name": "weat', ParsedAnswer("Hi")),
    "in a mark": ("Hi <tool_", ParsedAnswer("Hi")),
    "in the arguments": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro',
        ParsedAnswer("", "", (ToolCall("weather", '{"city": "Ro'),)),
    ),
    "in the closing mark": (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool',
        ParsedAnswer("", "", (ToolCall("now", "{}"),)),
    ),
    "in text": ("1 < 2 and 3 <", ParsedAnswer("1 < 2 and 3 <")),
    "in JSON": ('{"city": "Ro', ParsedAnswer('{"city": "Ro')),
}
BARE_CASES = {
    "a call": (
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        ParsedAnswer("", "", (ToolCall("weather", '{"city": "Rome"}'),)),
    ),
    "with a type": (
        ' {"type": "function", "name": "now", "parameters": {}}',
        ParsedAnswer("", "", (ToolCall("now", "{}"),)),
    ),
    "several": (
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {"a": 1}}',
        ParsedAnswer("", "", (ToolCall("now", "{}"), ToolCall("now", '{"a": 1}'))),
    ),
    "JSON that the user asked for": (
        '{"name": "Ann", "parameters": {"age": 3}}',
        ParsedAnswer('{"name": "Ann", "parameters": {"age": 3}}'),
    ),
    "text": ('It is {"name": "now"}', ParsedAnswer('It is {"name": "now"}')),
    "cut off in the tag": (" <|pyth", ParsedAnswer("<|pyth")),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_in_tags(name: str) -> None:
    text, expected = CASES[name]
    assert parse(text) == expected


@pytest.mark.parametrize("name", CUT)
def test_an_answer_that_a_limit_has_ended(name: str) -> None:
    text, expected = CUT[name]
    parser = TextParser(TAGGED, thinks=False, names=NAMES)
    assert collect([*parser.feed(text), *parser.finish(cut=True)]) == expected


def test_json_that_is_no_call_is_passed_on_while_it_comes() -> None:
    parser = TextParser(TAGGED, thinks=False, names=NAMES)
    assert collect(parser.feed('{"city": "Ro')).content == '{"city": "Ro'


@pytest.mark.parametrize("name", BARE_CASES)
def test_an_answer_of_llama(name: str) -> None:
    text, expected = BARE_CASES[name]
    assert parse(text, BARE) == expected


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 200), max_size=30))
def test_cuts_change_nothing(name: str, cuts: list[int]) -> None:
    text, expected = CASES[name]
    assert parse(text, cuts=cuts) == expected
    assert parse(text, cuts=list(range(len(text)))) == expected


@given(st.sampled_from(sorted(BARE_CASES)), st.lists(st.integers(0, 100), max_size=20))
def test_cuts_change_nothing_for_llama(name: str, cuts: list[int]) -> None:
    text, expected = BARE_CASES[name]
    assert parse(text, BARE, cuts=cuts) == expected


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = TextParser(TAGGED, thinks=False)
    assert parser.feed('<tool_call>\n{"name": "now", "arguments": {"a"')[-1].text == '{"a"'
    assert [part.text for part in parser.feed(": 1")] == [": 1"]


def test_all_calls_but_the_first_can_be_left_out() -> None:
    parser = OneCall(TextParser(TAGGED, thinks=False))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    found = collect([*parser.feed(f"A {call} B {call} C"), *parser.finish()])
    assert found == ParsedAnswer("A\nB\nC", "", (ToolCall("now", "{}"),))


def test_reasoning_that_the_prompt_began() -> None:
    assert parse("hm\n</think>\nYes", begun=True) == ParsedAnswer("Yes", "hm")
    assert parse("hm", begun=True) == ParsedAnswer("", "hm")


def test_what_is_not_asked_for_stays_text() -> None:
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert parse(text, None, thinks=False).content == text


@pytest.mark.parametrize(
    "call",
    ['{"name": "\\ud800", "arguments": {}}', '{"arguments": {"a": "\\ud800"}, "name": "now"}'],
)
def test_a_call_with_half_of_a_surrogate_pair_is_text(call: str) -> None:
    """No response could contain it: UTF-8 cannot encode it."""
    found = parse(f"<tool_call>\n{call}\n</tool_call>")
    assert found.tool_calls == () and call in found.content
    whole = call.replace("\\ud800", "\\ud83d\\ude00")
    assert len(parse(f"<tool_call>\n{whole}\n</tool_call>").tool_calls) == 1
