"""``cache_control``: which beginning of a prompt a request wants to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvboost.serve.anthropic.request_models import Mark
from kvboost.serve.choices import EngineCall
from kvboost.serve.prompts import encode
from kvboost.serve.server import ServerState
from kvboost.tokens.prompt import Conversation

_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Kept:
    """The marked beginnings of a conversation: their token ids with a few more, or None for all,
    and the seconds for which they are kept."""

    marked: Sequence[tuple[list[int] | None, int]] = ()

    def beginnings(self, prompt_ids: Sequence[int]) -> list[tuple[int, int]]:
        """How many tokens of the prompt to keep, and for how many seconds."""
        return [
            (len(prompt_ids) if ids is None else _shared(ids, prompt_ids), seconds)
            for ids, seconds in self.marked
        ]

    def num_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Tokens up to the last mark."""
        return max((tokens for tokens, _ in self.beginnings(prompt_ids)), default=0)


async def find_kept(
    server: ServerState, call: EngineCall, marks: Sequence[Mark], size: int
) -> Kept:
    """Tokenizes the marked beginnings of a conversation of about ``size`` characters: what they
    share with the prompt is kept."""
    marked: list[tuple[list[int] | None, int]] = []
    (conversation,) = call.prompts
    assert isinstance(conversation, Conversation)
    for mark in marks:
        if mark.num_messages == len(conversation.messages):
            marked.append((None, mark.seconds))
            continue
        messages = list(conversation.messages[: mark.num_messages])
        if not messages or messages[-1]["role"] != "user":
            messages.append(_QUESTION)  # some chat templates want one
        beginning = replace(conversation, messages=messages)
        ids = await server.workers.tokenize(call.tenant, size, encode, server.engine, beginning)
        marked.append((ids, mark.seconds))
    return Kept(marked)


def _shared(ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """The number of ids that both begin with."""
    most = min(len(ids), len(prompt_ids))
    differs = np.not_equal(ids[:most], prompt_ids[:most])
    return int(differs.argmax()) if differs.any() else most
