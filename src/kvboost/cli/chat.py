"""A conversation in the terminal: questions, answers, and commands that begin with a slash."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import kvboost
from kvboost.cli.common import print_line, summary
from kvboost.config import closest
from kvboost.errors import PromptError

if TYPE_CHECKING:
    from kvboost.results import GenerationResult

INTRODUCTION = "/help lists the commands. Ctrl-C stops an answer; /exit or an empty line ends."


@dataclass
class Conversation:
    """The messages so far, and how the next answer is generated."""

    engine: kvboost.KVBoost
    out: Console
    system: str | None = None
    max_new_tokens: int = 256
    mode: str = "chunk_kv_reuse"
    options: dict[str, Any] = field(default_factory=dict)
    """More options of ``engine.stream``."""
    turns: list[dict[str, str]] = field(default_factory=list)
    last: GenerationResult | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def run(self, ask: Callable[[], str]) -> None:
        """Talks until ``ask`` returns an empty line or a command ends the conversation."""
        self._say(INTRODUCTION)
        while (line := ask()) and self.take(line):
            pass

    def take(self, line: str) -> bool:
        """Answers a line or runs the command in it; False if the command is to leave. Two slashes
        begin a line that is no command."""
        if not line.startswith("/"):
            self._answer(line)
        elif line.startswith("//"):
            self._answer(line[1:])
        else:
            name, _, rest = line[1:].partition(" ")
            if name in _LEAVE:
                return False
            if name in _COMMANDS:
                _COMMANDS[name][1](self, rest.strip())
            else:
                guess = closest(name, [*_COMMANDS, *_LEAVE])
                hint = f"did you mean /{guess}? " if guess else ""
                self._say(
                    f"There is no command /{name}; {hint}/help lists them. Begin a line with // to "
                    "send it to the model."
                )
        return True

    def _answer(self, line: str) -> None:
        """Adds ``line`` and the model's answer, as far as it came before Ctrl-C."""
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            stream = self.engine.stream(asked, self.max_new_tokens, self.mode, **self.options)
        except PromptError as error:  # too long, mostly
            self._say(f"{error}; /clear begins a new conversation")
            return
        with stream, CtrlC() as ctrl_c:
            try:
                for piece in stream:
                    print(piece, end="", flush=True)
                    ctrl_c.can_wait = True
                    if ctrl_c.pressed:
                        break
            except KeyboardInterrupt:
                ctrl_c.pressed = True
        print()
        self.last = stream.result
        if ctrl_c.pressed:
            self._say("Stopped. The answer so far stays in the conversation; /clear removes it.")
        else:
            self._stats()
        self.turns.append({"role": "user", "content": line})
        self.turns.append({"role": "assistant", "content": self.last.output_text})

    def _help(self, _: str) -> None:
        for usage, _command, meaning in _COMMANDS.values():
            self._say(f"{usage:<14} {meaning}")
        self._say(f"{'/exit':<14} leave; so do /quit, /bye, Ctrl-D and an empty line")

    def _clear(self, _: str) -> None:
        self.turns.clear()
        self._say("The conversation is empty. The cache still knows what was read.")

    def _set_system(self, text: str) -> None:
        if text:
            self.system = text
        self._say(f"The system prompt is: {self.system}" if self.system else "No system prompt.")

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save needs the name of a file")
            return
        try:
            path = Path(name).expanduser()
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self._say(f"{name} cannot be written: {error.strerror or error}")
        else:
            self._say(f"{len(self.messages)} messages are in {path}")

    def _show_stats(self, _: str) -> None:
        if self.last is None:
            self._say("Nothing was asked yet.")
        else:
            self._stats()
        held = self.engine.cache_stats()
        self._say(f"in memory: {held['hot_chunks']:,} chunks, {held['hot_memory_mb']:,.1f} MB")

    def _stats(self) -> None:
        if self.last is not None:
            self.out.print(summary(self.last), style="dim")

    def _say(self, line: str) -> None:
        print_line(line, "dim", self.out)


class CtrlC:
    """Notes Ctrl-C instead of raising KeyboardInterrupt, while the next token will come soon: the
    answer then ends between two tokens, and the cache keeps what was read. Before the first token,
    and if it is pressed twice, Ctrl-C raises as usual."""

    def __init__(self) -> None:
        self.pressed = False
        self.can_wait = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        if self.pressed or not self.can_wait:
            raise KeyboardInterrupt
        self.pressed = True


_Command = Callable[[Conversation, str], None]
_COMMANDS: dict[str, tuple[str, _Command, str]] = {
    "help": ("/help", Conversation._help, "list the commands"),
    "clear": ("/clear", Conversation._clear, "begin a new conversation"),
    "system": ("/system TEXT", Conversation._set_system, "set or show the system prompt"),
    "save": ("/save FILE", Conversation._save, "write the conversation to a JSON file"),
    "stats": ("/stats", Conversation._show_stats, "what the last answer reused, and the cache"),
}
_LEAVE = ("exit", "quit", "bye")


def ask_in_terminal() -> str:
    """The next line that the user types; empty on Ctrl-D, and on Ctrl-C at the prompt. Lines that
    come through a pipe are printed, as a terminal shows what is typed."""
    try:
        line = input("you: ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""
    if not sys.stdin.isatty():
        print(line)
    return line


def edit_lines() -> None:
    """Gives the prompt line editing and a history, where Python has readline."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401
