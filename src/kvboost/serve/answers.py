"""The answers to one request: prompts times ``n``, running side by side on the engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvboost.results import GenerationResult
from kvboost.serve.errors import internal, shutting_down, timed_out
from kvboost.serve.logprobs import ShownToken, TokenReader
from kvboost.serve.request_models import MAX_SEED
from kvboost.serve.reuse_report import counts, spans
from kvboost.serve.server import ServerState

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvboost import AsyncTextStream

Prompt = str | list[int] | list[dict[str, str]]


@dataclass(frozen=True)
class EngineCall:
    """What a request wants of the engine."""

    prompts: Sequence[Prompt]
    n: int
    max_tokens: int | None
    mode: str
    salt: str
    seed: int | None
    options: dict[str, Any] = field(default_factory=dict)
    explain: bool = False


class Choice:
    """One answer on its way."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        ask: EngineCall,
        stream: AsyncTextStream,
        received: float,
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.ask = ask
        self._stream = stream
        self._received = received
        self._asked = time.perf_counter()
        self._tokens: TokenReader | None = None
        self._shown = 0
        self.ended: float | None = None

    @property
    def result(self) -> GenerationResult:
        """What there is so far."""
        return self._stream.result

    @property
    def ttft_ms(self) -> float:
        """From when the request's body was there to its first token."""
        return (self._asked - self._received) * 1e3 + self.result.ttft_ms

    @property
    def total_ms(self) -> float:
        return ((self.ended or time.perf_counter()) - self._received) * 1e3

    def read_tokens(self, reader: TokenReader) -> None:
        self._tokens = reader

    def tokens_of(self, piece: str) -> list[ShownToken] | None:
        """The tokens that ``piece``, the next of the answer, shows; None if nobody asked."""
        if self._tokens is None:
            return None
        self._shown += len(piece)
        return self._tokens.take(self.result.logprobs or (), self._shown)

    def check(self, timeout: float | None) -> None:
        """Raises ApiError if the answer ended otherwise than it should."""
        match self.result.finish_reason:
            case "stop" | "length":
                return
            case "timeout":
                raise timed_out(timeout)
            case "cancelled":  # not by us: we do not look at what we have cancelled
                raise shutting_down()
            case _:
                raise internal()


class Answers:
    """An iterator of ``(choice, piece)`` as pieces come, whosever they are; ``(choice, None)``
    when one is over. Leaving the ``async with`` block cancels whatever still runs, and frees it
    within one step. Pieces that nobody takes wait here, so a slow client holds up nobody."""

    def __init__(self, serving: ServerState, tenant: str, choices: list[Choice]) -> None:
        self.choices = choices
        self._serving = serving
        self._tenant = tenant
        self._pieces: asyncio.Queue[tuple[Choice, str | None] | Exception] = asyncio.Queue()
        self._running = len(choices)
        self._stack = AsyncExitStack()
        self._first: tuple[Choice, str | None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        try:
            await self._stack.aclose()
        finally:
            for choice in self.choices:
                if choice.ended is None:
                    self._note(choice)

    def start(self, streams: AsyncExitStack) -> None:
        """Begins to read; takes over the open streams."""
        self._stack = streams.pop_all()
        readers = [asyncio.ensure_future(self._read(choice)) for choice in self.choices]
        self._stack.push_async_callback(_stop, readers)

    async def begin(self) -> Choice:
        """Waits for the first piece, or end, of any; returns whose it is."""
        if self._first is None:
            self._first = await self._take()
        return self._first[0]

    async def finish(self) -> None:
        """Waits until all are over."""
        async for _ in self:
            pass

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, str | None]]:
        await self.begin()
        assert self._first is not None
        taken = self._first
        while True:
            yield taken
            self._running -= taken[1] is None
            if not self._running:
                return
            taken = await self._take()

    async def _take(self) -> tuple[Choice, str | None]:
        taken = await self._pieces.get()
        if isinstance(taken, Exception):
            raise taken
        if taken[1] is None:
            taken[0].check(self._serving.settings.timeout)
        return taken

    async def _read(self, choice: Choice) -> None:
        metrics = self._serving.metrics
        last, seen = time.perf_counter(), 0
        try:
            async for piece in choice._stream:
                now, tokens = time.perf_counter(), choice._stream.num_tokens
                if not seen:
                    metrics.first_token(choice.ttft_ms)
                else:
                    metrics.tokens(now - last, tokens - seen)
                last, seen = now, tokens
                self._pieces.put_nowait((choice, piece))
        except Exception as error:
            self._pieces.put_nowait(error)
            return
        self._note(choice)
        self._pieces.put_nowait((choice, None))

    def _note(self, choice: Choice) -> None:
        """Counts an answer that is over."""
        choice.ended = time.perf_counter()
        result = choice.result
        rows = counts(result.reuse)
        self._serving.metrics.answer(result.finish_reason, rows, len(result.token_ids))
        self._serving.live.add(
            ttft_ms=choice.ttft_ms if result.token_ids else None,
            estimated_ms=self._serving.engine.estimate_ms(len(choice.prompt_ids)),
            prompt_tokens=len(choice.prompt_ids),
            **{name.removesuffix("_tokens"): count for name, count in rows.items()},
            completion_tokens=len(result.token_ids),
            finish_reason=result.finish_reason,
            tenant=self._tenant,
        )


async def open_answers(
    serving: ServerState, tenant: str, ask: EngineCall, received: float
) -> Answers:
    """Reads the prompts and puts every answer in the queue, or none: raises what the engine says
    to the first that cannot be. To be left with ``async with``."""
    engine, settings = serving.engine, serving.settings
    prompts = [await asyncio.to_thread(engine.encode, prompt) for prompt in ask.prompts]
    wants_logprobs = ask.options.get("logprobs") is not None
    async with AsyncExitStack() as streams:
        choices: list[Choice] = []
        for prompt_ids in prompts:
            limit = _answer_limit(ask.max_tokens, len(prompt_ids), serving)
            for number in range(ask.n):
                stream = engine.astream(
                    prompt_ids,
                    limit,
                    ask.mode,
                    timeout=settings.timeout,
                    cache_salt=ask.salt,
                    seed=None if ask.seed is None else (ask.seed + number) % (MAX_SEED + 1),
                    **ask.options,
                )
                await streams.enter_async_context(stream)
                choice = Choice(len(choices), prompt_ids, ask, stream, received)
                if wants_logprobs:
                    choice.read_tokens(TokenReader(engine.decode, prompt_ids[-1]))
                choices.append(choice)
        answers = Answers(serving, tenant, choices)
        answers.start(streams)
        return answers


async def describe(serving: ServerState, choice: Choice) -> dict[str, Any]:
    """The ``kvboost`` object of an answer that is over."""
    result, engine = choice.result, serving.engine
    explained = await asyncio.to_thread(
        spans, result.reuse, choice.prompt_ids, engine.decode if choice.ask.explain else None
    )
    return {
        "mode": choice.ask.mode,
        "strategy": serving.strategy(choice.ask.options.get("recompute_strategy")),
        **counts(result.reuse),
        "charged_tokens": result.reuse.charged_tokens,
        "ttft_ms": round(choice.ttft_ms, 3),
        "queue_ms": round(result.timings.queue_ms, 3),
        "total_ms": round(choice.total_ms, 3),
        "estimated_ms_without_reuse": engine.estimate_ms(len(choice.prompt_ids)),
        "notes": list(result.reuse.notes),
        "spans": explained,
    }


def headers(choice: Choice) -> dict[str, str]:
    """How the first answer that spoke was served."""
    rows = counts(choice.result.reuse)
    shown = ("exact", "moved", "recomputed", "computed")
    return {
        "x-kvboost-ttft-ms": f"{choice.ttft_ms:.1f}",
        **{f"x-kvboost-{name}-tokens": str(rows[f"{name}_tokens"]) for name in shown},
    }


def usage(answers: Answers) -> dict[str, Any]:
    """A prompt counts once, however many answers it has; of those the first says what was
    cached."""
    firsts = [choice for choice in answers.choices if choice.index % choice.ask.n == 0]
    prompt = sum(len(choice.prompt_ids) for choice in firsts)
    completion = sum(len(choice.result.token_ids) for choice in answers.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.result.exact_tokens for choice in firsts)
        },
    }


def _answer_limit(max_tokens: int | None, prompt_tokens: int, serving: ServerState) -> int:
    """As long as was asked, or what the context still holds; the engine refuses a prompt that
    leaves nothing."""
    limit = max_tokens or serving.settings.default_max_tokens
    context = serving.engine.context_length
    return limit if context is None else max(1, min(limit, context - prompt_tokens))


async def _stop(readers: Sequence[asyncio.Future[None]]) -> None:
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
