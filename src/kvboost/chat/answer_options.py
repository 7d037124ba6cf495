"""The options of a chat request as those of a plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvboost.chat.styles import ChatStyle
from kvboost.chat.tool_use import Reasoning, ToolUse
from kvboost.config import stop_strings
from kvboost.structured.formats import FORMATS, grammar_for


class ChatTokenizer(Protocol):
    """The part of a tokenizer that the options depend on: how the model writes calls and
    reasoning."""

    @property
    def style(self) -> ChatStyle: ...

    @property
    def writes_special_tokens(self) -> bool: ...

    def reasoning_after(self, prompt_ids: Sequence[int]) -> Reasoning: ...


class Compiler(Protocol):
    """Compiles grammars, here or in another process."""

    def compile(self, grammar: str, option: str = "grammar") -> Any: ...


def answer_options(
    tokenizer: ChatTokenizer,
    grammars: Compiler,
    prompt_ids: Sequence[int],
    use: ToolUse,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """``options`` with a format that covers reasoning and calls of tools as well, which is then
    compiled, and with the strings that end a call."""
    grammar, option = grammar_for(options) or (None, "tools")
    if use.offered or use.is_forced or grammar is not None:
        grammar = use.grammar(tokenizer.style, grammar, tokenizer.reasoning_after(prompt_ids))
    prepared = {name: value for name, value in options.items() if name not in FORMATS}
    if grammar is not None:
        prepared["grammar"] = grammars.compile(grammar, "tools" if use.is_forced else option)
    if stops := use.stops(tokenizer.style, grammar):
        prepared["stop"] = [*stop_strings(options.get("stop")), *stops]
    if tokenizer.writes_special_tokens and not use.is_forced:
        prepared["skip_special_tokens"] = False
    return prepared
