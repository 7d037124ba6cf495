"""Log probabilities in the formats of OpenAI's two APIs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.results import TokenLogprob


@dataclass(frozen=True)
class ShownToken:
    """One generated token and where its text begins in the answer."""

    text: str
    token_id: int
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""
    offset: int
    shown: str
    """The text it added to the answer; empty while a character is incomplete."""
    top: tuple[tuple[str, int, float], ...]


class TokenReader:
    """Finds the text of an answer's tokens, in order. Special tokens have none."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], last_id: int, length: int = 0
    ) -> None:
        """``last_id``: the token before the first; ``length``: the characters up to it."""
        self._decode = decode
        self._before = last_id
        self._ids: list[int] = []
        """The ids since the last complete character."""
        self._waiting: list[ShownToken] = []
        self._read = 0
        self._length = length

    def take(self, logprobs: Sequence[TokenLogprob], shown: int) -> list[ShownToken]:
        """The tokens of ``logprobs`` that were not taken yet and whose text begins within the first
        ``shown`` characters of the answer. ``logprobs`` grows from call to call. Later tokens are
        held back because they may be part of a stop string, are one, or end the sequence."""
        for logprob in logprobs[self._read :]:
            self._waiting.append(self._next(logprob))
        self._read = len(logprobs)
        ready = [token for token in self._waiting if token.offset < shown]
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _next(self, logprob: TokenLogprob) -> ShownToken:
        self._ids.append(logprob.token_id)
        shown = self._text_after(self._before, *self._ids)
        if shown.endswith("\ufffd"):
            shown = ""
        token = ShownToken(
            self._text_after(self._last, logprob.token_id),
            logprob.token_id,
            logprob.logprob,
            self._length,
            shown,
            tuple(
                (self._text_after(self._last, other), other, value) for other, value in logprob.top
            ),
        )
        if shown:
            self._before, self._ids = logprob.token_id, []
        self._length += len(shown)
        return token

    @property
    def _last(self) -> int:
        """The token before the newest."""
        return self._ids[-2] if len(self._ids) > 1 else self._before

    def _text_after(self, before: int, *ids: int) -> str:
        """The text of ``ids`` after the token ``before``: some tokenizers show the blank before a
        word only after another token."""
        known, text = self._decode([before]), self._decode([before, *ids])
        return text[len(known) :] if text.startswith(known) else self._decode(list(ids))


def prompt_tokens(
    decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], told: Sequence[TokenLogprob]
) -> list[ShownToken]:
    """The tokens of a prompt. ``told`` are those from the second on; the first has no log
    probability. For a thread: a long prompt takes a while."""
    first, first_id = decode(prompt_ids[:1]), int(prompt_ids[0])
    reader = TokenReader(decode, first_id, len(first))
    start = ShownToken(first, first_id, None, 0, first, ())
    return [start, *reader.take(told, sys.maxsize)]


def prompt_logprobs(
    decode: Callable[[Sequence[int]], str], told: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """The log probabilities of a prompt in vLLM's format: by token id, the prompt's own token and
    the likeliest ones. The first token has none."""
    found: list[dict[str, Any] | None] = [None]
    for one in told:
        ranked: list[tuple[int, float, int | None]] = [
            (*top, rank) for rank, top in enumerate(one.top, start=1)
        ]
        if one.token_id not in {token_id for token_id, _ in one.top}:
            ranked.insert(0, (one.token_id, one.logprob, None))
        by_id = {}
        for token_id, logprob, rank in ranked:
            text = decode([token_id])
            by_id[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": text}
        found.append(by_id)
    return found


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.shown.encode()),
                "top_logprobs": [
                    {
                        "token": text,
                        "logprob": value,
                        "bytes": None if "\ufffd" in text else list(text.encode()),
                    }
                    for text, _, value in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else _by_text(token, token.logprob) for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(token: ShownToken, logprob: float) -> dict[str, float]:
    """Log probabilities by text, or by id where there is no text or it is another token's too."""
    found: dict[str, float] = {}
    for text, token_id, value in ((token.text, token.token_id, logprob), *token.top):
        if token_id == token.token_id and found:
            continue
        found[text if text and text not in found else f"token_id:{token_id}"] = value
    return found
