"""Transformers' own parser of answers, for tokenizers that come with a response template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from kvboost.chat.calls import Part

XML_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}
"""The response template of Qwen 3 Coder and Qwen 3.5, whose tokenizers have none."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateParser:
    """Reads an answer by a response template. Calls are passed on when they are complete."""

    def __init__(
        self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """``prefix``: the end of the prompt, which may have begun the answer."""
        self._parser: Any = ResponseParser(
            dict(template), prefix=prefix, tools=[dict(tool) for tool in tools]
        )
        self._region = ""
        """The text of a region that is read once it is complete."""

    def feed(self, text: str) -> list[Part]:
        if self._parser is None:
            return [Part("content", text)]
        return self._parts(lambda: self._parser.feed(text), text)

    def finish(self, *, cut: bool = False) -> list[Part]:
        if self._parser is None:
            return []
        if cut and self._region:  # a call that is not complete
            return []
        return self._parts(lambda: self._parser.finalize()[1], "")

    def _parts(self, read: Any, text: str) -> list[Part]:
        """The content and calls that ``read`` finds. A call that cannot be read is content, and so
        is all after it."""
        try:
            events = read()
        except (ValueError, TypeError):
            self._parser = None
            return [Part("content", self._region + text)]
        return [part for event in events for part in self._part(event)]

    def _part(self, event: Mapping[str, Any]) -> list[Part]:
        field = event["field"]
        match event["type"]:
            case "region_chunk" if event["dirty"]:
                self._region += event["text"]
            case "region_chunk" if field == "content":
                return [Part("content", event["text"])]
            case "region_chunk" if field in _REASONING:
                return [Part("reasoning", event["text"])]
            case "region_close" if field == "tool_calls":
                self._region = ""
                value = event["value"]
                calls = value if isinstance(value, list) else [value]
                return [part for call in calls for part in _call(call["function"])]
        return []


def _call(function: Mapping[str, Any]) -> list[Part]:
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [Part("call", str(function["name"])), Part("arguments", text)]
