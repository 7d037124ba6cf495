"""The requests in a file: a prompt as plain text, or JSON, a request a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.cli.common import unreadable
from kvboost.errors import ConfigError

EXPECTED = '{"messages": [...]}, {"prompt": "..."} or {"input": "..."}'
_NAMES = ("messages", "prompt", "input")


@dataclass(frozen=True)
class Asked:
    """One request."""

    line: int
    """Where the file has it, from 1."""
    given: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"request in line {self.line:,}"

    @property
    def cache_salt(self) -> str:
        return str(self.given.get("cache_salt", ""))

    @property
    def text(self) -> str | None:
        """The prompt, unless it is a conversation."""
        text: str | None = self.given.get("prompt", self.given.get("input"))
        return text

    def prompt(self) -> Any:
        """The prompt as an engine reads it."""
        from kvboost import Conversation

        if self.text is not None:
            return self.text
        options = self.given.get("chat_template_kwargs") or {}
        messages = [{**one, "content": _text(one)} for one in self.given["messages"]]
        return Conversation(messages, self.given.get("tools") or (), options)

    def body(self, answer: str | None = None) -> dict[str, Any]:
        """The body to send to a server; with an ``answer``, so that the server reads this too."""
        if self.text is not None:
            own = {"cache_salt": self.cache_salt} if self.cache_salt else {}
            return {"prompt": self.text + (answer or ""), **own}
        given = {name: value for name, value in self.given.items() if name != "stream_options"}
        if answer is None:
            return given
        said = {"role": "assistant", "content": answer}
        more = {"add_generation_prompt": False, "continue_final_message": True}
        return {**given, "messages": [*given["messages"], said], **more}

    def answer_before(self, following: Asked | None) -> str | None:
        """The answer to this request, if it was recorded or the ``following`` request holds it."""
        if isinstance(said := self.given.get("output"), str):
            return said
        if self.text is not None or following is None or following.text is not None:
            return None
        messages, later = self.given["messages"], following.given["messages"]
        more = later[len(messages) :]
        if later[: len(messages)] != messages or not more or more[0].get("role") != "assistant":
            return None
        return _text(more[0]) or None


def read_requests(name: str, read_stdin: Callable[[], str]) -> list[Asked]:
    """The requests of a file; ``-`` is standard input. Text that is not JSON is a prompt."""
    text = read_stdin() if name == "-" else _read(Path(name))
    if not text.strip():
        raise ConfigError(f"{name} is empty; give a prompt, or requests such as {EXPECTED}")
    if _is_array(text):
        raise ConfigError(
            f"{name} is one JSON array; give one request a line, as `jq -c '.[]' FILE` writes them"
        )
    if not text.lstrip().startswith("{"):
        return [Asked(1, {"prompt": text})]
    try:
        return [_check(name, 1, json.loads(text))]
    except ValueError:  # more than one object, or none
        pass
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                given = json.loads(line)
            except ValueError as error:
                said = f"{name}, line {number}: {error}; expected one request a line: {EXPECTED}"
                raise ConfigError(said) from None
            found.append(_check(name, number, given))
    return found


def _is_array(text: str) -> bool:
    """Whether a file is an array of requests, and no prompt that begins with a bracket."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text) if text.lstrip().startswith("[") else None
        return isinstance(found, list) and any(isinstance(one, dict) for one in found)
    return False


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable("FILE", file, error, f"give text, or requests: {EXPECTED}") from None


def _check(name: str, line: int, given: Any) -> Asked:
    """Raises ConfigError if a line is not a request."""
    where = f"{name}, line {line}"
    if not isinstance(given, dict) or not any(one in given for one in _NAMES):
        raise ConfigError(f"{where}: {str(given)[:60]!r} is no request; expected {EXPECTED}")
    messages = given.get("messages")
    if messages is None:
        text = given.get("prompt", given.get("input"))
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{where}: the prompt is {str(text)[:60]!r}, not a text")
    elif not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages={str(messages)[:60]} must be a list of messages")
    else:
        for one in messages:
            if not isinstance(one, dict) or not isinstance(one.get("role"), str):
                raise ConfigError(f'{where}: {str(one)[:60]!r} is no message; it needs a "role"')
            if _text(one) is None:
                said = f"{where}: a message of {one['role']!r} has content that is not text"
                raise ConfigError(said)
    return Asked(line, given)


def _text(message: Mapping[str, Any]) -> Any:
    """The text of a message, of which content parts are joined; None if it has other parts."""
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return "".join(map(str, texts)) if all(isinstance(one, str) for one in texts) else None
