"""An answer of the engine in an API process: its text is made here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from kvboost.config import stop_strings
from kvboost.results import PHASES, GenerationResult, Healing, ReuseReport, Timings, TokenLogprob
from kvboost.runtime.streams import AsyncTextStream
from kvboost.serve.remote.wire import Ended, News, from_wire
from kvboost.tokens.text import AnswerText, Tokenizer

_NO_TIMES = Timings(0.0, 0.0, **{f"{phase}_ms": 0.0 for phase in PHASES})
_NOTHING = ReuseReport(())
_TEXT_OPTIONS = ("stop_token_ids", "include_stop", "ignore_eos", "skip_special_tokens")


def text_of(
    tokenizer: Tokenizer, eos_ids: frozenset[int], options: Mapping[str, Any]
) -> AnswerText:
    """Makes the text of an answer to a request with ``options``."""
    given = {name: options[name] for name in _TEXT_OPTIONS if options.get(name) is not None}
    return AnswerText(tokenizer, eos_ids, stop=stop_strings(options.get("stop")), **given)


class RemoteState:
    """How far an answer is, as far as this process knows."""

    def __init__(
        self, text: AnswerText, options: Mapping[str, Any], explainer: Callable[..., Any]
    ) -> None:
        """``explainer``: what explains the report on its prompt."""
        self._text = text
        self._explainer = explainer
        self._pieces: list[str] = []
        self._has_logprobs = options.get("logprobs") is not None
        self._has_prompt_logprobs = options.get("prompt_logprobs") is not None
        self.token_ids: list[int] = []
        self.rows = 0
        self.new_chunks = 0
        self.reuse = _NOTHING
        self._timings = _NO_TIMES
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._ended: Ended | None = None

    def take(self, news: News) -> list[str]:
        """The text that ``news`` adds."""
        self.token_ids += news.token_ids
        if news.logprobs is not None:
            self._logprobs += news.logprobs
        if news.begun is not None:
            self.reuse = replace(news.begun.reuse, explainer=self._explainer)
            self._timings = news.begun.timings
            self._prompt_logprobs = news.begun.prompt_logprobs
        push = self._text.push
        pieces = [piece for token in news.token_ids if (piece := push(token))]
        if news.ended is not None:
            self._end(news.ended)
            is_complete = news.ended.finish_reason in ("stop", "length")
            if is_complete and news.ended.error is None and (held := self._text.finish()):
                pieces.append(held)
        self._pieces += pieces
        return pieces

    def _end(self, ended: Ended) -> None:
        self._ended, self._timings = ended, ended.timings
        if ended.reuse is not None:
            self.reuse = replace(ended.reuse, explainer=self._explainer)

    @property
    def healing(self) -> Healing | None:
        return None if self._ended is None else self._ended.healing

    def result(self) -> GenerationResult:
        """The result so far."""
        ended = self._ended
        return GenerationResult(
            output_text="".join(self._pieces),
            token_ids=list(self.token_ids),
            finish_reason="cancelled" if ended is None else ended.finish_reason,
            timings=self._timings,
            reuse=self.reuse,
            logprobs=list(self._logprobs) if self._has_logprobs else None,
            prompt_logprobs=list(self._prompt_logprobs) if self._has_prompt_logprobs else None,
            answer_exact_from=0 if ended is None else ended.exact_from,
            healing=self.healing,
            drafted_tokens=0 if ended is None else ended.drafted_tokens,
            accepted_tokens=0 if ended is None else ended.accepted_tokens,
        )


class RemoteStream(AsyncTextStream):
    """The answer to one request. Entering it waits until the engine has queued the request, or
    raises the error with which it refuses."""

    def __init__(self, state: RemoteState, on_news: Callable[[News], None]) -> None:
        super().__init__(state)
        self.state = state
        self._on_news = on_news
        self._queued: asyncio.Future[None] = self.event_loop.create_future()

    async def __aenter__(self) -> Self:
        try:
            await self._queued
        except asyncio.CancelledError:
            self._cancel()
            raise
        return self

    def accepted(self) -> None:
        """The request is queued."""
        if not self._queued.done():
            self._queued.set_result(None)

    def refused(self, error: Exception) -> None:
        """There is no answer, or no more of it."""
        if self._queued.done():
            self.end(error)
        else:
            self._ended = True
            self._queued.set_exception(error)

    def take(self, news: News) -> None:
        """More of the answer has arrived."""
        self.accepted()
        self._on_news(news)
        if pieces := self.state.take(news):
            self.push(pieces)
        if news.ended is not None:
            error = news.ended.error
            self.end(None if error is None else from_wire(error))
