"""Log probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.results import TokenLogprob


@dataclass(frozen=True)
class ShownToken:
    """One generated token and where its text begins in the answer."""

    text: str
    token_id: int
    logprob: float
    offset: int
    shown: str
    """What it added to the answer; nothing while a character is unfinished."""
    top: tuple[tuple[str, int, float], ...]


class TokenReader:
    """Puts text to an answer's tokens, in order. Special tokens have none."""

    def __init__(self, decode: Callable[[Sequence[int]], str], last_prompt_id: int) -> None:
        self._decode = decode
        self._before = last_prompt_id
        self._ids: list[int] = []
        """Since the last whole character, behind one token of context."""
        self._waiting: list[ShownToken] = []
        self._read = 0
        self._length = 0

    def take(self, logprobs: Sequence[TokenLogprob], shown: int) -> list[ShownToken]:
        """Those of ``logprobs``, which grows from call to call, that were not taken yet and whose
        text begins within the first ``shown`` characters of the answer. What lies behind is held
        back for a stop string, or was one, or ends the sequence."""
        for logprob in logprobs[self._read :]:
            self._waiting.append(self._next(logprob))
        self._read = len(logprobs)
        ready = [token for token in self._waiting if token.offset < shown]
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _next(self, logprob: TokenLogprob) -> ShownToken:
        self._ids.append(logprob.token_id)
        shown = self._behind(self._before, *self._ids)
        if shown.endswith("\ufffd"):
            shown = ""
        token = ShownToken(
            self._behind(self._last, logprob.token_id),
            logprob.token_id,
            logprob.logprob,
            self._length,
            shown,
            tuple((self._behind(self._last, other), other, value) for other, value in logprob.top),
        )
        if shown:
            self._before, self._ids = logprob.token_id, []
        self._length += len(shown)
        return token

    @property
    def _last(self) -> int:
        """The token before the newest."""
        return self._ids[-2] if len(self._ids) > 1 else self._before

    def _behind(self, before: int, *ids: int) -> str:
        """The text of ``ids`` as it stands behind ``before``: some tokenizers show a blank at a
        word's beginning only there."""
        known, text = self._decode([before]), self._decode([before, *ids])
        return text[len(known) :] if text.startswith(known) else self._decode(list(ids))


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.shown.encode()),
                "top_logprobs": [
                    {"token": text, "logprob": value, "bytes": _bytes(text)}
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
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(token: ShownToken) -> dict[str, float]:
    """Two tokens may have the same text, or none: those go by their id."""
    found: dict[str, float] = {}
    for text, token_id, value in ((token.text, token.token_id, token.logprob), *token.top):
        if token_id == token.token_id and found:
            continue
        found[text if text and text not in found else f"token_id:{token_id}"] = value
    return found


def _bytes(text: str) -> list[int] | None:
    return None if "\ufffd" in text else list(text.encode())
