"""Answers of the engine's loop on their way to an API process: one message for each step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import kvboost
from kvboost.results import Healing, ReuseReport
from kvboost.runtime.request import RequestState
from kvboost.serve.remote import wire
from kvboost.serve.remote.wire import News, Step

logger = logging.getLogger("kvboost.serve")

_KEPT_HEALING = 16
"""Of so many answers an API process shows what becomes of their approximate rows."""


class Outgoing:
    """The answers of one API process. The loop's thread calls it after each step, and it sends what
    is new of all of them at once, from that thread: to wake another one would take longer."""

    def __init__(self, engine: kvboost.KVBoost, pipe: wire.Pipe[wire.ToEngine]) -> None:
        self._engine = engine
        self._pipe = pipe
        self._news: list[News] = []
        self.running: dict[int, AnswerSender] = {}
        """By number."""
        self.healing: deque[tuple[int, Healing]] = deque(maxlen=_KEPT_HEALING)
        """Of the last answers with approximate rows."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], /, *arguments: Any) -> None:
        """Takes the calls of a step to the listeners."""
        try:
            callback(*arguments)
            news, self._news = self._news, []
            self._pipe.send(Step(news))
        except Exception:  # a defect; the loop has other answers to compute
            logger.exception("answers could not be sent to the API process")
            self._pipe.shut()

    def add(self, news: News) -> None:
        self._news.append(news)

    def end(self, number: int, healing: Healing | None) -> None:
        self.running.pop(number, None)
        if healing is not None:
            self.healing.append((number, healing))

    def estimate_ms(self, state: RequestState) -> float | None:
        return self._engine.estimate_ms(len(state.request.token_ids))

    def progress(self) -> dict[str, Any]:
        """How far answers without a first token are, and what became of approximate rows."""
        return {
            "reading": [
                (number, one.state.rows, one.state.reuse, self.estimate_ms(one.state))
                for number, one in list(self.running.items())
                if one.state is not None and not one.state.token_ids
            ],
            "healing": list(self.healing),
        }


class AnswerSender:
    """Sends one answer to its API process."""

    def __init__(self, outgoing: Outgoing, number: int) -> None:
        self.event_loop = outgoing
        self._number = number
        self.state: RequestState | None = None
        self._num_sent = 0
        self._reuse: ReuseReport | None = None
        """What was sent of it."""
        self.cancel: Callable[[], None] = lambda: None

    def listen(self, state: RequestState) -> AnswerSender:
        self.state = state
        return self

    def push(self, token_ids: Sequence[int]) -> None:
        state, start = self.state, self._num_sent
        assert state is not None
        self._num_sent += len(token_ids)
        news = News(self._number, list(token_ids))
        if state.logprobs:
            news.logprobs = state.logprobs[start : self._num_sent]
        if not start:
            self._reuse = state.reuse
            news.begun = wire.Begun(
                state.reuse,
                state.clock.timings(),
                self.event_loop.estimate_ms(state),
                state.prompt_logprobs,
            )
        self.event_loop.add(news)

    def end(self, error: BaseException | None) -> None:
        state = self.state
        assert state is not None
        ended = wire.Ended(
            state.finish_reason,
            state.clock.timings(),
            None if state.reuse is self._reuse else state.reuse,
            state.exact_from if state.is_exact else len(state.token_ids),
            state.healing,
            state.drafted_tokens,
            state.accepted_tokens,
            self.event_loop.estimate_ms(state),
            None if error is None else wire.to_wire(error),
        )
        self.event_loop.end(self._number, state.healing)
        self.event_loop.add(News(self._number, [], None, None, ended))
