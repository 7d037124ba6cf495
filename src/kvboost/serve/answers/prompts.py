"""Prompts as token ids. A text that cannot fit the context is refused before all of it is read, and
before it becomes more than was sent: what a request expands to is counted first. Beginnings that a
request marks by ``cache_control`` are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kvboost
from kvboost.chat.context_edits import REASONING
from kvboost.errors import ContextLengthError, PromptError
from kvboost.serve.documents import Document
from kvboost.serve.errors import ApiError, context_exceeded
from kvboost.serve.http.json_text import written_json
from kvboost.serve.http.workers import LARGE_BYTES
from kvboost.serve.schema.chat import Mark
from kvboost.tokens.hashing import TokenIds, common_prefix
from kvboost.tokens.images import ReadPrompt
from kvboost.tokens.prompt import Conversation, has_images

Prompt = str | list[int] | Conversation
_PIECE_CHARACTERS = 32 * 1024
_CUT_TOKENS = 16
"""A text that is cut may have a few more tokens than in one piece. So many are not counted."""
_LONG = 8
"""Characters per token of the context from which a text is counted in pieces first. English has
about four characters per token."""


def encode(engine: kvboost.KVBoost, prompt: Prompt, **options: Any) -> TokenIds:
    """The token ids of ``prompt``; see :func:`read`."""
    return read(engine, prompt, **options).token_ids


def size_of(prompt: Prompt, size: int) -> int:
    """The size that a prompt of ``size`` characters counts for. Small files may be large images."""
    is_large = isinstance(prompt, Conversation) and has_images(prompt)
    return max(size, LARGE_BYTES) if is_large else size


def read(
    engine: kvboost.KVBoost,
    prompt: Prompt,
    *,
    add_special_tokens: bool | None = None,
    truncate: int | None = None,
    suffix: str | None = None,
) -> ReadPrompt:
    """The token ids of ``prompt``, and its images if it has any; with ``truncate``, so many of the
    last ones. Raises an error as soon as they cannot fit the context. ``add_special_tokens``:
    whether text gets the tokens that the model expects in front; by default a conversation does
    not, its template has them. ``suffix``: the text after the answer. For a thread: a long text
    takes seconds."""
    limit = engine.context_length
    if isinstance(prompt, Conversation):
        if limit is not None and truncate is None:
            refuse_long_text(engine, texts_of(prompt), limit)
        if has_images(prompt):
            return _with_images(engine, prompt, truncate)
        # A template may write far more than it is given: it may indent, or repeat.
        prompt, add_special_tokens = engine.render(prompt), bool(add_special_tokens)
    if limit is not None and truncate is None:
        refuse_long_text(engine, [one for one in (prompt, suffix) if isinstance(one, str)], limit)
    special = True
    if isinstance(prompt, str):
        if truncate is not None:
            prompt = ending(prompt, truncate, engine.encode)
        special = add_special_tokens is not False and suffix is None
    if suffix is not None:
        before = engine.encode(prompt, add_special_tokens=special)
        after = engine.encode(suffix, add_special_tokens=False)
        try:
            prompt = engine.infill(before, after)
        except PromptError as error:
            raise ApiError(400, str(error), "unsupported_field", "suffix") from None
    found = engine.read(prompt, add_special_tokens=special)
    if truncate is not None:
        found = ReadPrompt(found.token_ids[-truncate:])
    return _fitting(found, limit)


def _with_images(engine: kvboost.KVBoost, prompt: Conversation, truncate: int | None) -> ReadPrompt:
    """A conversation with images, which cannot be cut."""
    if truncate is not None:
        said = "truncate_prompt_tokens does not go with images: they would be cut"
        raise ApiError(400, said, "invalid_value", "truncate_prompt_tokens")
    return _fitting(engine.read(prompt), engine.context_length)


def _fitting(found: ReadPrompt, limit: int | None) -> ReadPrompt:
    if limit is not None and len(found.token_ids) >= limit:
        raise ContextLengthError(len(found.token_ids), limit)
    return found


def refuse_long_text(
    engine: kvboost.KVBoost, texts: Iterable[str], limit: int, times: int = 1
) -> None:
    """Raises ApiError if ``texts`` have ``times`` times ``limit`` tokens or more for sure. Counts
    them piece by piece, so that 8 MiB of text cost no more than the context does."""
    texts = list(texts)
    if sum(map(len, texts)) <= _LONG * limit * times:
        return
    found = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            found += max(0, len(engine.encode(piece)) - _CUT_TOKENS)
            if found >= limit * times:
                raise _too_long(found, limit, times)


def beginning(text: str, most: int, encode: Callable[[str], Sequence[int]]) -> str:
    """``text``, or a beginning of it that has more than ``most`` tokens for certain."""
    size = _LONG * most
    while size < len(text) and len(encode(text[:size])) <= most + _CUT_TOKENS:
        size *= 2
    return text[:size]


def ending(text: str, most: int, encode: Callable[[str], Sequence[int]]) -> str:
    """The same for the end of ``text``."""
    size = _LONG * most
    while size < len(text) and len(encode(text[-size:])) <= most + _CUT_TOKENS:
        size *= 2
    return text[-size:]


def refuse_many_documents(
    engine: kvboost.KVBoost, documents: Sequence[Document], most_bytes: int
) -> None:
    """Raises ApiError if the texts of ``documents``, which a prompt refers to, do not fit the
    context for certain, or have more than ``most_bytes`` bytes: as many as a client could send.
    Looks at their records and at no text."""
    limit, found = engine.context_length, sum(max(0, one.tokens - 1) for one in documents)
    if limit is not None and found >= limit:
        raise _too_long(found, limit)
    if (size := sum(one.size for one in documents)) > most_bytes:
        said = f"the prompt refers to {len(documents):,} documents with {size:,} bytes"
        said += f"; at most {most_bytes:,} bytes are allowed, as in a body"
        raise ApiError(413, said, "prompt_too_large", "messages")


def _too_long(found: int, limit: int, times: int = 1) -> ApiError:
    more = f", and a conversation to edit may have up to {times} times as many" * (times > 1)
    return context_exceeded(
        f"the prompt has more than {found:,} tokens, but the model's context holds {limit:,}"
        f"{more}; shorten the prompt or choose a model with a longer context"
    )


def texts_of(conversation: Conversation) -> Iterator[str]:
    """All text that a chat template may write of a conversation. Calls and tools are JSON there."""
    for message in conversation.messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if part["type"] == "text")
        yield message.get("reasoning_content") or ""
        if calls := message.get("tool_calls"):
            yield written_json(calls)
    for value in (*conversation.tools, dict(conversation.template_options)):
        yield written_json(value)


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
