"""Prompts as token ids. A text that cannot fit the context is refused before all of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvboost.errors import ContextLengthError
from kvboost.serve.errors import context_exceeded

if TYPE_CHECKING:
    from kvboost import KVBoost

Prompt = str | list[int] | list[dict[str, str]]

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
    is_ids = not isinstance(prompt, str) and isinstance(prompt[0], int)
    ids = prompt if is_ids and len(prompt) >= limit else engine.encode(prompt)
    if len(ids) >= limit:
        raise ContextLengthError(len(ids), limit)
    return ids  # type: ignore[return-value]


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
    if isinstance(prompt, str):
        return [prompt]
    return [message["content"] for message in prompt if isinstance(message, dict)]
