"""Which beginnings of a prompt are kept, because the request marks them by ``cache_control``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvboost.chat.context_edits import REASONING
from kvboost.serve.schema.chat import Mark
from kvboost.tokens.hashing import TokenIds, common_prefix
from kvboost.tokens.prompt import Conversation, Prompt


@dataclass(frozen=True)
class Kept:
    """The marked beginnings of a conversation: token ids that begin with them and go on otherwise
    than the prompt, or None for all of the prompt, and the seconds for which they are kept."""

    marked: Sequence[tuple[TokenIds | None, int]] = ()

    def beginnings(self, prompt_ids: TokenIds) -> list[tuple[int, int]]:
        """How many tokens of the prompt to keep, and for how many seconds."""
        return [
            (len(prompt_ids) if ids is None else common_prefix(ids, prompt_ids), seconds)
            for ids, seconds in self.marked
        ]

    def num_tokens(self, prompt_ids: TokenIds) -> int:
        """Tokens up to the last mark."""
        return max((tokens for tokens, _ in self.beginnings(prompt_ids)), default=0)


async def find_kept(
    prompts: Sequence[Prompt],
    marks: Sequence[Mark],
    tokenize: Callable[[Prompt], Awaitable[TokenIds]],
) -> Kept:
    """Tokenizes the marked beginnings of the conversation that ``prompts`` has: what they share
    with the prompt is kept."""
    marked: list[tuple[TokenIds | None, int]] = []
    (conversation,) = prompts
    assert isinstance(conversation, Conversation)
    for mark in marks:
        if mark.num_messages == len(conversation.messages):
            marked.append((None, mark.seconds))
            continue
        # Templates look ahead: some write reasoning only after the last message of the user's. So
        # all messages stay, and the first that is not marked becomes another one.
        messages = list(conversation.messages)
        messages[mark.num_messages] = _altered(messages[mark.num_messages])
        other = replace(conversation, messages=messages)
        marked.append((await tokenize(other), mark.seconds))
    return Kept(marked)


def _altered(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the same parts, of which all are different."""
    texts = {name: "?" for name in ("content", *REASONING) if message.get(name)}
    calls = [
        {**call, "function": {**call["function"], "name": "?"}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **texts, **({"tool_calls": calls} if calls else {})}
