"""Prompts as token ids. A text that cannot fit the context is refused before all of it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvboost.errors import ContextLengthError
from kvboost.serve.errors import context_exceeded
from kvboost.tokens.prompt import Conversation

if TYPE_CHECKING:
    from kvboost import KVBoost

Prompt = str | list[int] | Conversation

_PIECE_CHARACTERS = 32 * 1024
_CUT_TOKENS = 16
"""A text that is cut may have a few more tokens than in one piece. So many are not counted."""
_LONG = 8
"""Characters per token of the context from which a text is counted in pieces first. English has
about four characters per token."""


def num_characters(prompt: Prompt) -> int:
    """The text in a prompt; 0 for token ids."""
    return sum(map(len, _texts(prompt)))


def encode(engine: KVBoost, prompt: Prompt) -> list[int]:
    """The token ids of ``prompt``. Raises an error as soon as they cannot fit the context. For a
    thread: a long text takes seconds."""
    limit = engine.context_length
    if limit is None:
        return engine.encode(prompt)
    refuse_long_text(engine, _texts(prompt), limit)
    is_long = isinstance(prompt, list) and len(prompt) >= limit
    ids = prompt if isinstance(prompt, list) and is_long else engine.encode(prompt)
    if len(ids) >= limit:
        raise ContextLengthError(len(ids), limit)
    return ids


def refuse_long_text(engine: KVBoost, texts: Sequence[str], limit: int) -> None:
    """Raises ApiError if ``texts`` have ``limit`` tokens or more for certain. Counts them piece by
    piece, so that 8 MiB of text cost no more than the context does."""
    if sum(map(len, texts)) <= _LONG * limit:
        return
    found = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            found += max(0, len(engine.encode(piece)) - _CUT_TOKENS)
            if found >= limit:
                raise context_exceeded(
                    f"the prompt has more than {found:,} tokens, but the model's context holds "
                    f"{limit:,}; shorten the prompt or choose a model with a longer context"
                )


def _texts(prompt: Prompt) -> list[str]:
    match prompt:
        case str():
            return [prompt]
        case Conversation():
            messages = [message["content"] for message in prompt.messages]
            calls = [message.get("tool_calls", []) for message in prompt.messages]
            return [*messages, *_strings(calls), *_strings(prompt.tools)]
        case _:
            return []


def _strings(value: Any) -> Iterator[str]:
    """All text in a JSON value, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, inside in value.items():
                yield key
                yield from _strings(inside)
        case list() | tuple():
            for inside in value:
                yield from _strings(inside)
