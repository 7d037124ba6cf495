"""The tools of one request, and what they mean for its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvboost.chat.grammar import Tool, calls_or, forced_calls, free_calls
from kvboost.chat.styles import THINK, THOUGHT, ChatStyle
from kvboost.errors import ConfigError
from kvboost.structured.formats import after_reasoning

Reasoning = Literal["none", "possible", "begun"]


@dataclass(frozen=True)
class ToolUse:
    """``choice`` is ``"auto"``, ``"none"`` or ``"required"``. ``named``: the one tool that must be
    called. ``parallel``: whether an answer may have several calls."""

    tools: Sequence[Tool] = ()
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that the prompt names: none with ``"none"``, so that the model calls none."""
        return () if self.choice == "none" else self.tools

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.offered)

    @property
    def is_forced(self) -> bool:
        return self.named is not None or self.choice == "required"

    @property
    def _is_strict(self) -> bool:
        return any(tool["function"].get("strict") for tool in self.offered)

    @property
    def needs_grammar(self) -> bool:
        """Whether calls are held to a grammar also if the answer has no format."""
        return self.is_forced or self._is_strict

    def grammar(self, style: ChatStyle, answer: str | None, reasoning: Reasoning) -> str | None:
        """The grammar of the whole answer; None if anything may be written. ``answer``: the grammar
        that the request asks for, apart from tools."""
        grammar = answer
        if self.is_forced:
            called = [tool for tool in self.offered if self.named in (None, _name(tool))]
            several = self.parallel and self.named is None
            grammar = forced_calls(called, style.calls, parallel=several)
        elif self.offered and answer is not None:
            grammar = calls_or(answer, self.offered, style.calls, parallel=self.parallel)
        elif self._is_strict:
            return free_calls(self.offered, style.calls, parallel=self.parallel)
        if grammar is None or reasoning == "none":
            return grammar
        return after_reasoning(grammar, begun=reasoning == "begun")

    def stops(self, style: ChatStyle, grammar: str | None) -> list[str]:
        """The strings that end an answer: the end of its first call, if there may be one only and
        no grammar sees to it."""
        limited = self.offered and not self.parallel and grammar is None
        return [style.calls.closes] if limited and style.calls.closes else []


def tool_use(tools: Sequence[Tool], choice: str) -> ToolUse:
    """Checks what a caller gives. ``choice`` may also be the name of a tool."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"tools: {tool!r} must be like {{'type': 'function', 'function': {{'name': …, "
                "'description': …, 'parameters': …}}"
            )
    names = [_name(tool) for tool in tools]
    if choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise ConfigError("tool_choice='required' needs tools")
        return ToolUse(tools, choice)
    if choice not in names:
        raise ConfigError(
            f"tool_choice={choice!r} must be 'auto', 'none', 'required' or the name of a tool; "
            f"the tools are {', '.join(names) or 'none'}"
        )
    return ToolUse(tools, "required", choice)


def reasoning_in(prompt_end: str, style: ChatStyle) -> Reasoning:
    """Whether an answer may begin with reasoning, or the prompt has opened it already."""
    end = prompt_end.rstrip()
    if not style.thinks or end.endswith(THOUGHT):
        return "none"
    return "begun" if end.endswith(THINK) else "possible"


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name
