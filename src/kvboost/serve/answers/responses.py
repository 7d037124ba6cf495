"""Responses made of answers: as one document, or streamed, mostly as server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

from starlette.requests import Request
from starlette.responses import Response

import kvboost
from kvboost.serve.answers.answers import (
    Answers,
    describe,
    headers,
    keep_reports,
    open_answers,
    usage,
)
from kvboost.serve.answers.choices import Choice, EngineCall
from kvboost.serve.answers.logprobs import prompt_logprobs
from kvboost.serve.answers.prompts import Prompt
from kvboost.serve.answers.reports import new_id
from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError, answer_to, logger, shutting_down
from kvboost.serve.http.problems import short
from kvboost.serve.http.streaming import (
    DONE,
    JsonBytes,
    LiveResponse,
    TextEvents,
    event,
    unless_gone,
)
from kvboost.serve.schema.generation import Generation
from kvboost.serve.server import ServerState

_OF_PROMPT = ("prompt_logprobs", "prompt_token_ids")
_NAMED = 8
"""Unknown fields that a note names."""
_PART_BYTES = 64 * 1024
"""A part of a stream that has more is sent, even if the next piece has arrived."""


def engine_call(
    server: ServerState, caller: Tenant, body: Generation, prompts: Sequence[Prompt]
) -> EngineCall:
    """The call of the engine that ``body`` asks for. Raises ApiError 400 if it asks for more
    answers than the engine could ever queue. A tenant among others may use half of the queue, but
    not the last place while it has running requests."""
    n, config = body.n or 1, server.engine.config
    answers = n * len(prompts)
    share = config.max_waiting
    if caller.counts_as:
        share = (share + 1) // 2 if share > 1 else 0
    limit = share + config.max_running
    if answers > limit:
        said = f"{len(prompts)} prompts and n={n} make {answers} answers"
        told = f"{said}; this server allows {limit} at a time"
        raise ApiError(400, told, "too_many_answers", "n" if n > 1 else "prompt")
    place = caller.place(body.cache_salt)
    given = body.engine_options() | {
        "adapter": server.adapter(body.model),
        "mode": body.kvboost.mode or server.settings.mode,
        "cache_salt": place.salt,
        "tenant": caller.counts_as,
        "timeout": server.settings.timeout,
    }
    formats = body.formats()
    for options in formats.values():
        given |= options
    return EngineCall(
        body,
        prompts,
        {name: value for name, value in given.items() if value is not None},
        place,
        next(iter(formats), None),
        session=body.kvboost.session,
        session_ttl=body.kvboost.session_ttl,
    )


def ignored_note(fields: Sequence[str]) -> tuple[str, ...]:
    """The note in an answer about fields that the server does not know."""
    if not fields:
        return ()
    named = ", ".join(short(name) for name in fields[:_NAMED])
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    return (f"fields that this server does not know were left out: {named}{more}",)


class AnswerWriter(Protocol):
    """How an API writes the answers to one request."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The document of answers that have ended."""

    def events(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        """The stream of answers that have begun."""

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails: its status has been sent."""


async def respond(
    request: Request, server: ServerState, call: EngineCall, writer: ChoicesWriter
) -> Response:
    """Answers a request in one of OpenAI's formats with ``choices``."""
    return await deliver(
        request, server, call, writer, call.body.model, stream=bool(call.body.stream)
    )


async def deliver(
    request: Request,
    server: ServerState,
    call: EngineCall,
    writer: AnswerWriter,
    model: str,
    *,
    stream: bool,
    media_type: str = "text/event-stream; charset=utf-8",
) -> Response:
    """Answers a request as ``writer`` writes it; ``media_type`` is that of a stream. If the client
    closes its connection, cancels the answers and raises ClientGone."""
    server.check_model(model)
    state = request.state
    notes = (*call.notes, *ignored_note(state.ignored))
    call = replace(call, size=call.size + state.body_size, notes=notes)
    if server.settings.log_prompts:
        logger.info("%s prompts %r", state.request_id, call.prompts)
    caller: Tenant = state.tenant
    opening = partial(open_answers, server, caller.name, state.request_id, call, state.received)
    if not stream:
        return await unless_gone(request.receive, _whole(opening, writer, call))
    answers, first = await unless_gone(request.receive, _begun(opening))
    return LiveResponse(
        _events(server, answers, writer, request.state.request_id), media_type, headers(first)
    )


async def _whole(
    opening: Callable[[], Awaitable[Answers]], writer: AnswerWriter, call: EngineCall
) -> Response:
    async with aclosing(await opening()) as answers:
        first = await answers.begin()
        async for _ in answers:
            pass
        encode = partial(JsonBytes, await writer.whole(answers), headers=headers(first))
        return await call.write(encode)


async def _begun(opening: Callable[[], Awaitable[Answers]]) -> tuple[Answers, Choice]:
    """Answers, and the first choice that has a piece."""
    answers = await opening()
    try:
        return answers, await answers.begin()
    except BaseException:
        await answers.aclose()
        raise


async def _events(
    server: ServerState, answers: Answers, writer: AnswerWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The events that ``writer`` writes, in as few parts as possible: all that has arrived is one
    part. If the server stops before the answers have ended, the last event is an error that says
    so."""
    async with aclosing(answers), aclosing(writer.events(answers)) as events:
        written = bytearray()
        try:
            async for one in events:
                written += one
                if answers.is_waiting or len(written) > _PART_BYTES:
                    yield bytes(written)
                    written.clear()
        except asyncio.CancelledError:
            if not server.draining:  # the client is gone
                raise
            written += writer.failure(shutting_down())
        except Exception as error:
            with_message = server.settings.log_prompts
            written += writer.failure(answer_to(error, request_id, with_message=with_message))
        if written:
            yield bytes(written)


class ChoicesWriter(ABC):
    """Writes answers as ``choices``, as each of OpenAI's formats has them."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    has_one_prompt: ClassVar[bool]
    """Whether all answers are to the same prompt."""

    def __init__(self, server: ServerState, call: EngineCall) -> None:
        self._server = server
        self._body = call.body
        self._returns_ids = bool(call.body.return_token_ids)

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The object before the first piece, if there is one. The prompt has been read."""

    @abstractmethod
    def piece(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        """The objects for the next piece; none if what it belongs to is not clear yet."""

    @abstractmethod
    def closing(self, choice: Choice) -> list[dict[str, Any]]:
        """The objects after the last piece. The last of them has the finish reason."""

    @abstractmethod
    def complete(self, choice: Choice) -> dict[str, Any]:
        """The object of an answer that has ended."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        choices = [await self._whole_choice(choice) for choice in answers.choices]
        of_prompt: dict[str, Any] = {}
        if self.has_one_prompt:  # vLLM's place for them then
            for one in choices:
                of_prompt |= {name: one.pop(name) for name in _OF_PROMPT if name in one}
        reports = [await describe(self._server, choice) for choice in answers.choices]
        if len(choices) > 1:
            choices = [
                {**one, "kvboost": report} for one, report in zip(choices, reports, strict=True)
            ]
        head = _head(self.id_prefix, self.whole_object, self._body.model)
        keep_reports(self._server, head["id"], answers.choices)
        return {
            **head,
            "choices": choices,
            **of_prompt,
            "usage": usage(answers),
            **answers.choices[0].call.edits_report(),
            "kvboost": reports[0],
        }

    async def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        told, decode = choice.result.prompt_logprobs, self._server.engine.decode
        whole = await choice.call.write(self.complete, choice)
        if told is not None:
            whole["prompt_logprobs"] = await choice.call.write(prompt_logprobs, decode, told)
        if self._returns_ids:
            whole["token_ids"] = choice.result.token_ids
            whole["prompt_token_ids"] = choice.prompt_ids.tolist()
        return whole

    async def events(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        body = self._body
        head = _head(self.id_prefix, self.chunk_object, body.model)
        includes_usage, is_continuous = body.includes_usage, body.has_continuous_usage
        if includes_usage:
            head["usage"] = None  # in every chunk but the last
        shown = Counter[int]()
        """Token ids that were sent, by the index of the choice."""

        def chunk(choice: Choice, given: dict[str, Any], **more: Any) -> bytes:
            if is_continuous:
                more["usage"] = usage(answers)
            if self._returns_ids:
                ids = choice.result.token_ids
                given["token_ids"] = ids[shown[choice.index] :]
                shown[choice.index] = len(ids)
            return event({**head, "choices": [given], **more})

        def texts(choice: Choice) -> TextEvents:
            return TextEvents(lambda text: {**head, "choices": self.piece(choice, text)})

        is_plain = not (is_continuous or self._returns_ids)
        plain = {
            choice: texts(choice)
            for choice in answers.choices
            if is_plain and choice.is_plain and body.longest_answer != 0
        }

        def opening(choice: Choice) -> bytes:
            given = self.opening(choice)
            if given is None:
                return b""
            if self._returns_ids:
                given["prompt_token_ids"] = choice.prompt_ids.tolist()
            return chunk(choice, given)

        running, unopened = len(answers.choices), {*answers.choices}
        async for choice, piece in answers:
            if choice in unopened:  # its prompt has been read now
                unopened.remove(choice)
                if begins := await choice.call.write(opening, choice):
                    yield begins
            if piece is not None:
                if choice in plain:
                    yield plain[choice].event(piece)
                else:
                    for one in self.piece(choice, piece):
                        yield chunk(choice, one)
                continue
            running -= 1
            *others, closing = self.closing(choice)
            for one in others:
                yield chunk(choice, one)
            if len(answers.choices) > 1:
                closing["kvboost"] = await describe(self._server, choice)
            is_last = not running and not includes_usage
            yield chunk(choice, closing, **(await self._reports(answers, head) if is_last else {}))
        if includes_usage:
            more = {"usage": usage(answers), **await self._reports(answers, head)}
            yield event({**head, "choices": [], **more})
        yield DONE

    async def _reports(self, answers: Answers, head: dict[str, Any]) -> dict[str, Any]:
        """The reports on the prompt at the end of a stream: its edits, and what was reused."""
        first = answers.choices[0]
        keep_reports(self._server, head["id"], answers.choices)
        return {**first.call.edits_report(), "kvboost": await describe(self._server, first)}

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{new_id()}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"kvboost-{kvboost.__version__}",
    }
