"""Grammars of answers that call tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.chat.styles import CallStyle
from kvboost.structured.formats import json_schema, literal

Tool = Mapping[str, Any]
"""A tool in OpenAI's format: ``{"type": "function", "function": {"name": …}}``."""
_TEXT = "TEXT: /(.|\\n)*/"


def forced_calls(tools: Sequence[Tool], style: CallStyle, *, parallel: bool) -> str:
    """Answers that are one call of one of ``tools``, or several."""
    start = f"call ({literal(style.between)} call)*" if parallel else "call"
    call = f"call: {_quoted(style.before)} ({_any(tools)}) {_quoted(style.after)}"
    return _grammar([f"start: {start}", call, *_rules(tools, style)])


def free_calls(tools: Sequence[Tool], style: CallStyle, *, parallel: bool) -> str:
    """Answers in which only what is in a call is checked: text, calls, or both."""
    rules = _rules(tools, style)
    if not style.opens:
        more = f"({literal(style.between)} ({_any(tools)}))*" if parallel else ""
        text = "TEXT: /([^{ \\n](.|\\n)*)?/"
        return _grammar([f"start: TEXT | ({_any(tools)}) {more}", text, *rules])
    start = "(lead body)* TEXT" if parallel else "TEXT | lead body"
    return _grammar(
        [
            f"start: {start}",
            _TEXT,
            f"lead[lazy]: TEXT {literal(style.opens)}",
            f"body: {literal(style.before.removeprefix(style.opens))} ({_any(tools)}) "
            f"{_quoted(style.after)}",
            *rules,
        ]
    )


def calls_or(grammar: str, tools: Sequence[Tool], style: CallStyle, *, parallel: bool) -> str:
    """Answers that are calls, or in ``grammar``."""
    answer, *others = json.loads(grammar)["grammars"]
    (calls,) = json.loads(forced_calls(tools, style, parallel=parallel))["grammars"]
    either = {"lark_grammar": "start: @calls | @answer"}
    named = [{**calls, "name": "calls"}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": [either, *named, *others]})


def _rules(tools: Sequence[Tool], style: CallStyle) -> list[str]:
    """The JSON object of a call of each tool. A strict tool's schema holds as a whole; of other
    schemas, what can be enforced."""
    rules = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        beginning = literal(f'{{"name": {name}, "{style.arguments}": ')
        schema = _arguments(function.get("parameters"), strict=bool(function.get("strict")))
        rules.append(f'tool_{number}: {beginning} %json {json.dumps(schema)} "}}"')
    return rules


def _arguments(schema: Mapping[str, Any] | None, *, strict: bool) -> dict[str, Any]:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    return json_schema({"type": "object", **schema} if schema else none, lenient=not strict)


def _any(tools: Sequence[Tool]) -> str:
    return " | ".join(f"tool_{number}" for number in range(len(tools)))


def _quoted(text: str) -> str:
    return literal(text) if text else ""


def _grammar(rules: Sequence[str]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}]})
