"""Text to ids and back again, token by token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a tokenizer that KVBoost needs."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` with the special tokens the model expects in front."""

    def encode_fragment(self, text: str) -> list[int]:
        """Ids of ``text`` alone, to be joined with others."""

    def chat_frame(self) -> tuple[str, str] | None:
        """The text that the chat template puts before and after a first user message, up to the
        answer; None if there is no chat template."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation in the model's own template, ready for the next answer, or for the rest
        of its last message. ``options`` are the template's. Special tokens are in the text."""


class Detokenizer:
    """Turns a growing list of ids into text pieces, each token decoded once or twice.

    A token may hold half a character, and its text may depend on the token before it. So a piece
    is the difference between two decodings that start at the same id, and it is held back while
    it ends in an unfinished character::

        ids    ... | prefix .. read | read .. end
        piece  =  decode(prefix..end) - decode(prefix..read)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._known: str | None = ""
        """The text of ``prefix .. read``, if it has been decoded."""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        """The text that was still held back."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if self._known is None:
            self._known = self._decode(self._ids[self._prefix : self._read])
        known, text = self._known, self._decode(self._ids[self._prefix :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not final):
            return ""
        self._prefix, self._read, self._known = self._read, len(self._ids), None
        return text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, wherever the tokens are cut.

    ``push`` returns the text that is safe to show and holds back text that may still become a stop
    string. After a match, ``stopped`` is true and no more text follows. With ``includes``, the stop
    string is the last of the text.
    """

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes = includes
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        if self.stopped:
            return ""
        self._held += piece
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            at, stop = min(found)
            return self._release(at + len(stop) if self._includes else at)
        return self._release(len(self._held) - self._possible_start())

    def finish(self) -> str:
        """The text that was held back for a stop string that did not come."""
        return "" if self.stopped else self._release(len(self._held))

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        return out


class AnswerText:
    """The text of an answer that arrives token by token, without what ends it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._ends = frozenset[int]() if ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(stop_token_ids)
        self._includes_stop = include_stop
        self._skips = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopMatcher(stop, includes=include_stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """The text that may be shown now that ``token_id`` is there."""
        if not self._shows(token_id):
            return ""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The text that was held back."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    def _shows(self, token_id: int) -> bool:
        """Whether the text of a token belongs to the answer. Skipped special tokens have none."""
        if token_id in self._stop_ids:
            return self._includes_stop
        return token_id not in self._ends or self._skips
