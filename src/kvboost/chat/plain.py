"""Tools for chat templates that know none: as text, in the words that Qwen's templates use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.chat.styles import TAGGED

Message = Mapping[str, Any]

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a conversation has calls or results of tools."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """``messages`` in the roles system, user and assistant, with all about tools in their text."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_said(message['content'])}\n</tool_response>"
            if not (shown and shown[-1].get("results")):
                shown.append({"role": "user", "results": []})
            shown[-1]["results"].append(text)
        else:
            shown.append({"role": message["role"], "content": _with_calls(message)})
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=lines)
        if shown and shown[0]["role"] == "system":
            shown[0]["content"] = f"{_said(shown[0]['content'])}\n\n{introduction}"
        else:
            shown.insert(0, {"role": "system", "content": introduction})
    return [
        {"role": one["role"], "content": one.get("content") or "\n".join(one.get("results", ()))}
        for one in shown
    ]


def _with_calls(message: Message) -> str | list[Mapping[str, Any]]:
    """The content of a message, and then its calls as text. Content parts stay parts, because some
    may be images."""
    calls = [
        f"{TAGGED.before}{json.dumps(call['function'], ensure_ascii=False)}{TAGGED.after}"
        for call in message.get("tool_calls") or ()
    ]
    content = message["content"]
    if content and not isinstance(content, str):
        return [*content, *({"type": "text", "text": call} for call in calls)]
    return "\n".join([*([content or ""] if content or not calls else []), *calls])


def _said(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message, or of its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")
