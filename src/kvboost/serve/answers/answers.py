"""The answers to one request: ``n`` for each prompt, running together on the engine's loop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

from kvboost.errors import StructuredOutputError
from kvboost.serve.answers.choices import Choice, EngineCall
from kvboost.serve.answers.logprobs import TokenReader
from kvboost.serve.answers.prompts import read, size_of
from kvboost.serve.answers.reports import counts, current_record, spans
from kvboost.serve.errors import ApiError, internal
from kvboost.serve.schema.fields import MAX_SEED
from kvboost.serve.schema.generation import Generation
from kvboost.serve.server import ServerState
from kvboost.structured.formats import FORMATS
from kvboost.tokens.hashing import TokenIds

if TYPE_CHECKING:
    from kvboost.serve.metrics import Metrics


class Answers:
    """An iterator of ``(choice, piece)`` in the order in which pieces arrive, and of ``(choice,
    None)`` when a choice ends. ``aclose`` cancels the answers that still run and frees their KV
    within one step. Pieces wait here, so a slow client does not slow down the engine."""

    def __init__(
        self, server: ServerState, tenant: str, request_id: str, choices: list[Choice]
    ) -> None:
        self.choices = choices
        self._server = server
        self._tenant = tenant
        self._request_id = request_id
        self._record = current_record()
        self._arrived: deque[tuple[Choice, str | None] | Exception] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """Done when something has arrived, if the task that takes the pieces waits."""
        self._running = len(choices)
        self._stack = AsyncExitStack()
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True
        try:
            await self._stack.aclose()
        finally:
            for choice in self.choices:
                if choice.ended is None:
                    self._note(choice)

    def start(self, streams: AsyncExitStack) -> None:
        """Starts to read the open streams, and closes them in the end."""
        self._stack = streams.pop_all()
        for choice in self.choices:
            self._server.live.begin(choice, self._request_id)
            choice.stream.read_by(_ChoiceReader(self, choice, self._server.metrics))

    @property
    def is_waiting(self) -> bool:
        """Whether the next piece or end has yet to arrive."""
        return not self._arrived and self._running > 0

    async def begin(self) -> Choice:
        """Waits for the first piece or end; returns its choice."""
        if not self._arrived:
            await self._wait()
        return self._first()[0]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Choice, str | None]:
        if not self._running:
            raise StopAsyncIteration
        if not self._arrived:
            await self._wait()
        first = self._first()
        self._arrived.popleft()
        self._running -= first[1] is None
        return first

    async def _wait(self) -> None:
        """Waits for the next piece or end."""
        while not self._arrived:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def _first(self) -> tuple[Choice, str | None]:
        """The first of what has arrived. Raises the error if it is one."""
        first = self._arrived[0]
        if isinstance(first, Exception):
            raise first
        if first[1] is None:
            first[0].check(self._server.settings.timeout)
        return first

    def add(self, *arrived: tuple[Choice, str | None] | Exception) -> None:
        """Takes in what has arrived, until it is closed."""
        if not self._closed:
            self._arrived.extend(arrived)
            if self._arrival is not None and not self._arrival.done():
                self._arrival.set_result(None)

    def end(self, choice: Choice) -> None:
        """Ends ``choice``, whose text is complete. First pins what is marked in its prompt, and the
        KV of its conversation if that has a session. Of several answers, the first counts."""
        if self._closed:
            return
        if choice.is_first:
            self._keep_marked(choice)
        if choice.call.session is None or not choice.is_first:
            self._end(choice)
        else:
            renewal = asyncio.ensure_future(self._renew_session(choice, choice.call.session))
            self._stack.push_async_callback(_stop, renewal)

    def _end(self, choice: Choice) -> None:
        try:
            self._note(choice)
            self.add((choice, None))
        except Exception as error:
            self.add(error)

    def _keep_marked(self, choice: Choice) -> None:
        place, adapter = choice.call.place, choice.call.adapter
        for tokens, seconds in choice.call.kept.beginnings(choice.prompt_ids):
            ids = choice.prompt_ids[:tokens]
            told = f"{place.owner}\0{place.salt}\0{adapter}\0{seconds}\0".encode() + ids.tobytes()
            key = f"cache_control:{blake2b(told, digest_size=16).hexdigest()}"
            self._server.kept_kv.keep(key, ids, place, seconds, adapter)

    async def _renew_session(self, choice: Choice, session: str) -> None:
        call = choice.call
        ids = choice.conversation_ids
        renew = self._server.sessions.renew
        try:
            problem = await asyncio.to_thread(
                renew, call.place, session, ids, call.session_ttl, call.adapter
            )
        except Exception as error:
            self.add(error)
            return
        choice.notes += [] if problem is None else [problem]
        self._end(choice)

    def _note(self, choice: Choice) -> None:
        """Counts an answer that has ended."""
        self._server.live.end(choice)
        choice.ended = time.perf_counter()
        self._record.choices.append(choice)
        result = choice.result
        rows = counts(result.reuse)
        self._server.metrics.answer(result.finish_reason, rows, len(result.token_ids))
        self._server.live.add(
            result.healing,
            request_id=self._request_id,
            ttft_ms=choice.ttft_ms if result.token_ids else None,
            total_ms=choice.total_ms,
            estimated_ms=self._server.engine.estimate_ms(len(choice.prompt_ids)),
            prompt_tokens=len(choice.prompt_ids),
            **{name.removesuffix("_tokens"): count for name, count in rows.items()},
            completion_tokens=len(result.token_ids),
            finish_reason=result.finish_reason,
            tenant=self._tenant,
        )


@dataclass(eq=False)
class _ChoiceReader:
    """Takes in the pieces of one choice, and measures the time between them."""

    _answers: Answers
    _choice: Choice
    _metrics: Metrics
    _seen: int = 0
    _last: float = 0.0

    def push(self, pieces: list[str]) -> None:
        self._answers.add(*[(self._choice, piece) for piece in pieces])
        try:
            self._measure()
        except Exception as error:  # a defect of ours; other answers are told after this one
            self._answers.add(error)

    def _measure(self) -> None:
        now, seen = time.perf_counter(), self._choice.stream.num_tokens
        if self._seen:
            self._metrics.tokens(now - self._last, seen - self._seen)
        else:
            self._metrics.first_token(self._choice.ttft_ms)
        self._last, self._seen = now, seen

    def end(self, error: BaseException | None) -> None:
        match error:
            case None:
                self._answers.end(self._choice)
            case StructuredOutputError():
                self._answers.add(_unsupported(error, self._choice.call))
            case Exception():
                self._answers.add(error)
            case _:  # what would end the server if a task raised it
                self._answers.add(internal())


async def open_answers(
    server: ServerState, tenant: str, request_id: str, call: EngineCall, received: float
) -> Answers:
    """Tokenizes the prompts and queues all answers. If the engine refuses one, raises its error and
    queues none. The caller must close the result."""
    engine = server.engine
    work = partial(
        read,
        engine,
        add_special_tokens=call.body.add_special_tokens,
        truncate=_truncated_tokens(call.body, engine.context_length),
        suffix=call.suffix,
    )
    tenant_name = call.options["tenant"]
    prompts = [
        await server.workers.tokenize(tenant_name, size_of(prompt, call.size), work, prompt)
        for prompt in call.prompts
    ]
    wants_logprobs = call.options.get("logprobs") is not None
    longest, seed, use = call.body.longest_answer, call.body.seed, call.body.use
    async with AsyncExitStack() as streams:
        choices: list[Choice] = []
        for found in prompts:
            prompt_ids = found.token_ids
            options = {
                **await _options(server, call, prompt_ids),
                **await _boundaries(server, call, prompt_ids),
                **_marks(call, prompt_ids),
            }
            limit = _answer_limit(longest, len(prompt_ids), server)
            if longest is None or limit < longest:  # the context sets the limit
                least = options.get("min_new_tokens", 0)
                options |= {"min_new_tokens": min(least, limit)} if least else {}
            for number in range(call.n):
                if seed is not None:
                    options["seed"] = (seed + number) % (MAX_SEED + 1)
                stream = engine.astream(found, limit, **options)
                await streams.enter_async_context(stream)
                choice = Choice(len(choices), prompt_ids, call, stream, received)
                if wants_logprobs:
                    choice.tokens = TokenReader(engine.decode, int(prompt_ids[-1]))
                if use is not None:
                    choice.parser = engine.answer_parser(prompt_ids.tolist(), use)
                choices.append(choice)
        answers = Answers(server, tenant, request_id, choices)
        answers.start(streams)
        return answers


async def _options(server: ServerState, call: EngineCall, prompt_ids: TokenIds) -> dict[str, Any]:
    """The options of the engine. A format is compiled in a thread, which may take seconds."""
    use = call.body.use

    def compiled() -> dict[str, Any]:
        if use is not None:
            return server.engine.answer_options(prompt_ids.tolist(), use, call.options)
        grammar = server.engine.compile_format(call.options)
        if grammar is None:
            return call.options
        plain = {name: value for name, value in call.options.items() if name not in FORMATS}
        return {**plain, "grammar": grammar}

    has_grammar = call.format_field is not None or bool(use and use.needs_grammar)
    try:
        if has_grammar:
            return await server.workers.compile(call.options["tenant"], compiled)
        return compiled()
    except StructuredOutputError as error:
        raise _unsupported(error, call) from None


def _unsupported(error: StructuredOutputError, call: EngineCall) -> ApiError:
    """Names the field of the request that asked for the format."""
    field = "tools" if error.option == "tools" else call.format_field
    said = str(error) if field is None else f"{field} cannot be enforced: {error.reason}"
    return ApiError(400, said, "unsupported_format", field)


async def _boundaries(
    server: ServerState, call: EngineCall, prompt_ids: TokenIds
) -> dict[str, Any]:
    """Where the documents of a prompt begin and end, if chunks end there: then their chunks are
    those that were read in advance."""
    engine = server.engine
    if not call.documents or engine.config.chunking != "document":
        return {}

    def locate() -> list[int]:
        places = (engine.locate(text, prompt_ids) for text in call.documents)
        return sorted({row for place in places if place is not None for row in place})

    size = sum(map(len, call.documents))
    return {"boundaries": await server.workers.tokenize(call.options["tenant"], size, locate)}


def _marks(call: EngineCall, prompt_ids: TokenIds) -> dict[str, Any]:
    """Where the beginnings end that the request marks, as long as they are no whole prompt."""
    ends = {tokens for tokens, _ in call.kept.beginnings(prompt_ids) if tokens < len(prompt_ids)}
    return {"marks": sorted(ends)} if ends else {}


_SHOWN = ("answer_exact_from", "healed_tokens", "drafted_tokens", "accepted_tokens")


async def describe(server: ServerState, choice: Choice) -> dict[str, Any]:
    """The ``kvboost`` object of an answer that has ended."""
    result, engine = choice.result, server.engine
    if choice.call.body.kvboost.explain:
        explained = await asyncio.to_thread(spans, result.reuse, choice.prompt_ids, engine.decode)
    else:
        explained = spans(result.reuse, choice.prompt_ids)
    return {
        "mode": choice.call.mode,
        "strategy": server.strategy(choice.call.options.get("recompute_strategy")),
        **counts(result.reuse),
        "charged_tokens": result.reuse.charged_tokens,
        **{name: getattr(result, name) for name in _SHOWN},
        "ttft_ms": round(choice.ttft_ms, 3),
        "queue_ms": round(result.timings.queue_ms, 3),
        "total_ms": round(choice.total_ms, 3),
        "estimated_ms_without_reuse": engine.estimate_ms(len(choice.prompt_ids)),
        "notes": [*result.reuse.notes, *choice.notes],
        "spans": explained,
    }


def keep_reports(server: ServerState, answer_id: str, choices: Sequence[Choice]) -> None:
    """Notes answers that have ended, to be explained by their id: the first to each prompt."""
    firsts = [choice for choice in choices if choice.is_first]
    reports = [choice.result.reuse for choice in firsts]
    server.explanations.keep(firsts[0].call.place.owner, answer_id, reports)


def headers(choice: Choice) -> dict[str, str]:
    """The headers that say how ``choice``, the first to give a piece, was served."""
    rows = counts(choice.result.reuse)
    shown = ("exact", "moved", "recomputed", "computed")
    return {
        "x-kvboost-ttft-ms": f"{choice.ttft_ms:.1f}",
        **{f"x-kvboost-{name}-tokens": str(rows[f"{name}_tokens"]) for name in shown},
    }


def usage(answers: Answers) -> dict[str, Any]:
    """The ``usage`` object. A prompt counts once, whatever its number of answers, and its cached
    tokens are those of the first answer."""
    firsts = [choice for choice in answers.choices if choice.is_first]
    prompt = sum(len(choice.prompt_ids) for choice in firsts)
    wanted = [choice for choice in answers.choices if choice.call.body.longest_answer != 0]
    completion = sum(len(choice.result.token_ids) for choice in wanted)
    drafted = sum(choice.result.drafted_tokens for choice in answers.choices)
    accepted = sum(choice.result.accepted_tokens for choice in answers.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.result.cached_tokens for choice in firsts),
            "exact_tokens": sum(choice.result.exact_tokens for choice in firsts),
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _truncated_tokens(body: Generation, context: int | None) -> int | None:
    """How many tokens of a prompt are read at most, if it asks for a limit."""
    wanted = body.truncate_prompt_tokens
    if wanted is None or (wanted < 0 and context is None):
        return None
    room = sys.maxsize if context is None else context - (body.longest_answer or 1)
    return max(1, room if wanted < 0 else wanted)


def _answer_limit(max_tokens: int | None, prompt_tokens: int, server: ServerState) -> int:
    """The requested length, or what the context still holds. The engine refuses a full one."""
    default = server.settings.default_max_tokens
    limit = default if max_tokens is None else max(1, max_tokens)
    context = server.engine.context_length
    return limit if context is None else max(1, min(limit, context - prompt_tokens))


async def _stop(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
