"""The prompts of a coding agent, turn by turn: its tools, files, calls and their results.

``append``  each result follows the call, as a chat grows: nothing that was sent before changes
``files``   the open files come before the history, as they are now: a file that is read is inserted
            there and an edit changes it there, so the history after it moves

A script decides which tool is called and what comes back, since small models choose badly. The
model writes the call, held to the tool's JSON schema, and its words go back with the next turn. The
list of tools is text, so that every server reads the same prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.bench.texts.functions import path_of
from kvboost.bench.texts.prompts import sources

LAYOUTS = ("append", "files")
FILE_TOKENS = 320
FOUND_LINES = 6
TRACE_LINES = 8
SCRIPT = (
    *("search", "read", "read", "edit", "test", "read", "edit", "test", "search", "read"),
    *("edit", "test", "read", "edit", "test", "search", "edit", "read", "edit", "test"),
)
"""The tools of twenty turns; a longer session begins again."""
RULES = (
    "You are a coding agent. In every turn you call exactly one tool. Answer with a JSON object "
    "that has your thought, the name of the tool and its arguments, and with nothing else. Read a "
    "file before you edit it. Make the smallest change that solves the task, and run the tests "
    "after every change. If they fail, read what they say before you change anything else."
)
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 40}
_LINE: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 999}
TOOLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "search": (
        "Search all files of the project for a word. Returns the lines that contain it, each with "
        "the name of its file and its number. At most six lines are shown.",
        {"word": _TEXT, "folder": _TEXT},
    ),
    "read": (
        "Open a file of the project and show its text. A file stays open until the end of the "
        "session, and what you see of it is always its newest version.",
        {"path": _TEXT},
    ),
    "edit": (
        "Replace one line of an open file by one or more new lines. The other lines stay as they "
        "are. Returns the lines around the change as they are afterwards.",
        {"path": _TEXT, "line": _LINE, "text": _TEXT},
    ),
    "test": (
        "Run the tests of one file, or of the whole project if no file is named. Returns the names "
        "of the tests that failed, and the end of the first traceback.",
        {"path": _TEXT, "verbose": {"type": "boolean"}},
    ),
}


@dataclass(frozen=True)
class Turn:
    """One call and what it changes."""

    tool: str
    result: str
    """The text after the call if files are part of the history."""
    note: str
    """The text after it if they are not."""
    files: tuple[tuple[str, str], ...]
    """The open files after the call: names and texts."""

    @property
    def schema(self) -> dict[str, Any]:
        """That of the answer. The thought is free text, the tool is given."""
        arguments = TOOLS[self.tool][1]
        return _object(
            thought={"type": "string", "maxLength": 80},
            name={"const": self.tool},
            arguments=_object(**arguments),
        )


class Session:
    """The turns of one agent, the same for the same seed."""

    def __init__(self, layout: str, turns: int, seed: str, count: Callable[[str], int]) -> None:
        self.layout = layout
        self._random = random.Random(seed)
        self._count = count
        self._unread = list(sources())
        self._random.shuffle(self._unread)
        self._lines = [
            f"{path_of(name)}:{number}: {line.strip()}"
            for name, text in self._unread
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip()
        ]
        self._task = f"Task {seed}: make the functions of {path_of(self._unread[0][0])} faster."
        self.turns = tuple(self._play(turns))

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The prompt of the turn after ``answers``."""
        done = self.turns[: len(answers)]
        made = [_message("system", f"{RULES}\n\nTools:\n{tool_list()}")]
        if self.layout == "files":
            files = done[-1].files if done else ()
            shown = "\n\n".join(f"# {name}\n{text}" for name, text in files) or "none"
            made.append(_message("user", f"Open files:\n\n{shown}\n\n{self._task}"))
        else:
            made.append(_message("user", self._task))
        for answer, turn in zip(answers, done, strict=True):
            said = turn.note if self.layout == "files" else turn.result
            made += [_message("assistant", answer), _message("user", f"{turn.tool}: {said}")]
        return made

    def _play(self, turns: int) -> Iterator[Turn]:
        files: dict[str, str] = {}
        for number in range(turns):
            tool = SCRIPT[number % len(SCRIPT)]
            result, note = getattr(self, f"_{tool}")(files)
            yield Turn(tool, result, note, tuple(files.items()))

    def _search(self, files: dict[str, str]) -> tuple[str, str]:
        found = "\n".join(self._random.sample(self._lines, FOUND_LINES))
        return found, found

    def _read(self, files: dict[str, str]) -> tuple[str, str]:
        name, source = self._unread[len(files) % len(self._unread)]
        path = path_of(name) if path_of(name) not in files else f"copy_{len(files)}/{path_of(name)}"
        files[path] = self._excerpt(source)
        return f"# {path}\n{files[path]}", f"{path} is open."

    def _edit(self, files: dict[str, str]) -> tuple[str, str]:
        path = self._random.choice(list(files))
        lines = files[path].splitlines()
        at = self._random.randrange(len(lines))
        lines[at : at + 1] = [f"# was: {lines[at].strip()}", f"{lines[at]}  # changed"]
        files[path] = "\n".join(lines)
        around = "\n".join(lines[max(0, at - 2) : at + 4])
        return f"# {path}, line {at + 1}\n{around}", f"line {at + 1} of {path} is changed."

    def _test(self, files: dict[str, str]) -> tuple[str, str]:
        trace = "\n".join(self._random.sample(self._lines, TRACE_LINES))
        said = f"{self._random.randrange(1, 40)} failed\n{trace}\nAssertionError"
        return said, said

    def _excerpt(self, source: str) -> str:
        """Whole lines from somewhere in ``source``, of about ``FILE_TOKENS`` tokens."""
        lines = source.splitlines()
        at = self._random.randrange(max(1, len(lines) // 2))
        taken: list[str] = []
        while self._count("\n".join(taken)) < FILE_TOKENS and at < len(lines):
            taken.append(lines[at])
            at += 1
        return "\n".join(taken)


def tool_list() -> str:
    """The part of the system prompt about the tools."""
    return "\n".join(
        json.dumps({"name": name, "description": told, "parameters": _object(**arguments)})
        for name, (told, arguments) in TOOLS.items()
    )


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
