"""The engine's side of an API process: calls its methods, and hands it its answers.

All of this is in the interpreter that computes answers, so it does little: no text, no JSON, no
checks of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import kvboost
from kvboost.results import Healing, ReuseReport
from kvboost.runtime.request import RequestState
from kvboost.serve.embedder import Encoder, Vectors, advance
from kvboost.serve.live import KEPT_HEALING
from kvboost.serve.remote import wire
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.images import PlacedImages, ReadPrompt

logger = logging.getLogger("kvboost.serve")

_AT_ONCE = frozenset({"pin_cached", "drop_pin", "serving_stats", "estimate_ms"})
"""Methods that take a few milliseconds at most."""
_IN_A_THREAD = frozenset(
    {
        *("cache_stats", "chunks", "compile_format", "forget", "forget_salt", "pins", "plan"),
        *("trace", "unpin", "warm_later", "load_adapter", "unload_adapter"),
    }
)
_COROUTINES = frozenset({"awarm", "apin"})
_WITHOUT_RESULT = frozenset({"compile_format"})


@dataclass(eq=False)
class Host:
    """One API process as the engine's process sees it. For the event loop of that process."""

    _engine: kvboost.KVBoost
    _pipe: wire.Pipe[wire.ToEngine]
    _own_embedder: kvboost.EmbeddingModel | None
    on_ready: Callable[[], None]
    on_lost: Callable[[], None]
    on_reloaded: Callable[[int, bool], None]
    on_adapters: Callable[[], None]
    """Adapters have changed, which all API processes must know."""

    def __post_init__(self) -> None:
        self._answers = Outgoing(self._engine, self._pipe)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._embeddings: dict[int, Generator[None, None, Vectors]] = {}
        self._loop = asyncio.get_running_loop()
        self._pipe.serve_in(self._loop, self._receive)

    def send(self, message: wire.ToApi) -> None:
        self._pipe.send(message)

    def tell_adapters(self) -> None:
        self.send(wire.Adapters(self._engine.adapters()))

    def close(self) -> None:
        """Ends what it has asked for, and the connection."""
        if self._pipe.socket.fileno() < 0:
            return
        self._pipe.leave(self._loop)
        for answer in list(self._answers.running.values()):
            answer.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._embeddings.clear()
        self._pipe.close()

    def _receive(self) -> None:
        try:
            messages = self._pipe.receive()
        except wire.Lost:
            self.close()
            self.on_lost()
            return
        accepted = []
        for message in messages:
            match message:
                case wire.Ask():
                    if self._ask(message):
                        accepted.append(message.number)
                case wire.Cancel():
                    self._cancel(message.number)
                case wire.Call():
                    self._call(message)
                case wire.Ready():
                    self.on_ready()
                case wire.Reloaded():
                    self.on_reloaded(message.number, message.taken)
        if accepted:
            self.send(wire.Accepted(accepted))

    def _ask(self, ask: wire.Ask) -> bool:
        """Queues an answer; False if it is refused."""
        answer = AnswerSender(self._answers, ask.number)
        self._answers.running[ask.number] = answer
        try:
            answer.cancel = self._engine.answer_to(
                answer.listen,
                _prompt_of(ask),
                ask.max_new_tokens,
                ask.mode,
                timeout=ask.timeout,
                **ask.options,
            )
        except Exception as error:
            del self._answers.running[ask.number]
            self.send(wire.Refused(ask.number, wire.to_wire(error)))
            return False
        return True

    def _cancel(self, number: int) -> None:
        if (answer := self._answers.running.get(number)) is not None:
            answer.cancel()
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()

    def _call(self, call: wire.Call) -> None:
        if call.method in _AT_ONCE:
            method = getattr(self._engine, call.method)
            try:
                self._reply(call, method(*call.arguments, **call.options))
            except Exception as error:
                self._refuse(call, error)
        else:
            task = self._loop.create_task(self._run(call))
            self._tasks[call.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(call.number, None))

    async def _run(self, call: wire.Call) -> None:
        try:
            self._reply(call, await self._result(call))
        except Exception as error:
            self._refuse(call, error)

    async def _result(self, call: wire.Call) -> Any:
        method, arguments, options = call.method, call.arguments, call.options
        if method in _COROUTINES:
            return await getattr(self._engine, method)(*arguments, **options)
        if method in _IN_A_THREAD:
            found = await asyncio.to_thread(getattr(self._engine, method), *arguments, **options)
            if method.endswith("load_adapter"):
                self.on_adapters()
            return None if method in _WITHOUT_RESULT else found
        if method == "embed":
            return await self._embed(*arguments)
        if method == "end_embedding":
            self._embeddings.pop(arguments[0], None)
            return None
        if method == "progress":
            return self._answers.progress()
        raise ValueError(f"there is no method {method!r}")

    async def _embed(self, number: int, batch: list[list[int]] | None) -> Any:
        """Embeds the next slice of ``number``, which begins with a ``batch``. Returns the vectors
        after the last one: their shape and bytes."""
        if batch is not None:
            encoder: Encoder = self._own_embedder or self._engine.embedder
            self._embeddings[number] = encoder.steps(batch)
        steps = self._embeddings[number]
        done = await asyncio.wrap_future(self._engine.between_steps(partial(advance, steps)))
        if done is None:
            return None
        self._embeddings.pop(number, None)
        return [*done.shape, done.astype("<f4").tobytes()]

    def _reply(self, call: wire.Call, value: object) -> None:
        self.send(wire.Reply(call.number, wire.packed(value)))

    def _refuse(self, call: wire.Call, error: Exception) -> None:
        self.send(wire.Reply(call.number, wire.packed(None), wire.to_wire(error)))


def _prompt_of(ask: wire.Ask) -> ReadPrompt:
    """The prompt of a message, which the API process has checked."""
    ids: TokenIds = np.frombuffer(ask.token_ids, np.int32)
    return ReadPrompt(ids, PlacedImages(ids, *ask.images) if ask.images else None)


class Outgoing:
    """The answers of one API process. The loop's thread calls it after each step, and it sends what
    is new of all of them at once, from that thread: to wake another one would take longer."""

    def __init__(self, engine: kvboost.KVBoost, pipe: wire.Pipe[wire.ToEngine]) -> None:
        self._engine = engine
        self._pipe = pipe
        self._news: list[wire.News] = []
        self.running: dict[int, AnswerSender] = {}
        """By number."""
        self.healing: deque[tuple[int, Healing]] = deque(maxlen=KEPT_HEALING)
        """Of the last answers with approximate rows."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], /, *arguments: Any) -> None:
        """Takes the calls of a step to the listeners."""
        try:
            callback(*arguments)
            news, self._news = self._news, []
            self._pipe.send(wire.Step(news))
        except Exception:  # a defect; the loop has other answers to compute
            logger.exception("answers could not be sent to the API process")
            self._pipe.shut()

    def add(self, news: wire.News) -> None:
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
        """The report that was sent to the API process."""
        self.cancel: Callable[[], None] = lambda: None

    def listen(self, state: RequestState) -> AnswerSender:
        self.state = state
        return self

    def push(self, token_ids: Sequence[int]) -> None:
        state, start = self.state, self._num_sent
        assert state is not None
        self._num_sent += len(token_ids)
        news = wire.News(self._number, list(token_ids))
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
        self.event_loop.add(wire.News(self._number, [], None, None, ended))
