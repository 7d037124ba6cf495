"""Reads the calls of tools in an answer while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

_BEGINNING = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*\{'
)
"""A call up to the bracket that opens its arguments."""
_FIRST_KEY = re.compile(r'\s*\{\s*"(?P<key>(?:[^"\\]|\\.)*)"$')
_KEYS = ("name", "type", "function", "id", "arguments", "parameters")
"""The keys that an object of a call may begin with."""


@dataclass(frozen=True)
class Part:
    """A part of an answer. ``call`` begins a call; its text is the name of the tool, and
    ``arguments`` parts add to the JSON text of its arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class CallReader:
    """Reads one JSON value, a call or a list of calls, character by character. The arguments of a
    call in the usual order are passed on as they come; any other value is read once it is complete.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """``names``: a value that calls none of these tools is no call; None allows any name."""
        self._names = names
        self.text = ""
        """The text that has been read."""
        self.is_complete = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._passes_on = False
        self.has_begun = False
        """Whether it has found a call."""
        self.is_hopeless = False
        """Whether what was read cannot become a call."""

    def push(self, character: str) -> list[Part]:
        """Reads one more character."""
        self.text += character
        was_in_string = self._in_string
        opened = self._count(character)
        if was_in_string and not self._in_string and self._depth == 1:
            found = _FIRST_KEY.match(self.text)
            self.is_hopeless = found is not None and found["key"] not in _KEYS
        if self._passes_on:
            self._passes_on = self._depth > 1
            return [Part("arguments", character)]
        if opened and self._depth == 2 and not self.has_begun:
            found = _BEGINNING.fullmatch(self.text)
            name = _parsed(found["name"]) if found else None
            if isinstance(name, str) and self._is_tool(name):
                self._passes_on = self.has_begun = True
                return [Part("call", name), Part("arguments", character)]
        if self._depth == 0 and character in "}]":
            self.is_complete = True
            return [] if self.has_begun else self._whole()
        return []

    def _count(self, character: str) -> bool:
        """Follows strings and brackets; whether ``character`` opens a bracket."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
            return True
        elif character in "}]":
            self._depth = max(0, self._depth - 1)
        return False

    def _whole(self) -> list[Part]:
        """The calls of a complete value."""
        value = _parsed(self.text)
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
        if not calls or not all(call and self._is_tool(call[0]) for call in calls):
            return []
        self.has_begun = True
        return [
            part
            for name, arguments in filter(None, calls)
            for part in (Part("call", name), Part("arguments", arguments))
        ]

    def _is_tool(self, name: str) -> bool:
        return self._names is None or name in self._names


def _parsed(text: str) -> Any:
    """The value of JSON text; None if it is none, or has half of a surrogate pair in a string:
    UTF-8 cannot encode it."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> tuple[str, str] | None:
    """The name and the arguments of a call; None if ``value`` is none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # already JSON text
        return value["name"], arguments
    return value["name"], json.dumps(arguments or {}, ensure_ascii=False)
