"""Responses made of answers: as one document, or streamed as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvboost
from kvboost.chat.tool_use import ToolUse
from kvboost.serve.answers import (
    Answers,
    Choice,
    EngineCall,
    describe,
    headers,
    open_answers,
    usage,
)
from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError, answer_to, logger
from kvboost.serve.request_models import Generation
from kvboost.serve.server import ServerState
from kvboost.serve.streaming import DONE, LiveResponse, event, unless_gone


class ResponseFormat(Protocol):
    """How one of OpenAI's APIs writes an answer: the objects in ``choices``."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The object before the first piece, if there is one."""

    def piece(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        """The objects for the next piece; none if what it belongs to is not clear yet."""

    def closing(self, choice: Choice) -> list[dict[str, Any]]:
        """The objects after the last piece. The last of them has the finish reason."""

    def whole(self, choice: Choice) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ResponseOptions:
    """How a request wants its response."""

    model: str
    stream: bool
    include_usage: bool


def response_options(body: Generation) -> ResponseOptions:
    options = body.stream_options
    return ResponseOptions(body.model, bool(body.stream), bool(options and options.include_usage))


def engine_call(
    server: ServerState,
    caller: Tenant,
    body: Generation,
    prompts: Any,
    max_tokens: int | None,
    logprobs: int | None,
    use: ToolUse | None = None,
) -> EngineCall:
    """What ``body`` asks of the engine. Raises ApiError 400 if it asks for more answers than the
    engine could ever queue. A tenant among others may use half of the queue."""
    n, queue = body.n or 1, server.engine.serving_stats()
    share = (queue["max_waiting"] + 1) // 2 if caller.counts_as else queue["max_waiting"]
    limit = share + queue["max_running"]
    if n * len(prompts) > limit:
        raise ApiError(
            400,
            f"{len(prompts)} prompts and n={n} make {n * len(prompts)} answers; this server allows "
            f"{limit} at a time",
            code="too_many_answers",
            param="n" if n > 1 else "prompt",
        )
    bias = body.logit_bias
    given = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "stop": body.stop,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": None if bias is None else {int(key): bias[key] for key in bias},
        "logprobs": logprobs,
        "recompute_strategy": body.kvboost.strategy,
        "recompute_ratio": body.kvboost.ratio,
        "heal": body.kvboost.heal,
        "exactness": body.kvboost.exactness,
    }
    format_field = None
    for field, options in body.formats().items():
        format_field = field
        given |= options
    return EngineCall(
        prompts,
        n,
        max_tokens,
        body.kvboost.mode or server.settings.mode,
        caller.salt(body.cache_salt),
        caller.counts_as,
        body.seed,
        {name: value for name, value in given.items() if value is not None},
        body.kvboost.explain,
        use,
        format_field,
    )


async def respond(
    request: Request,
    server: ServerState,
    call: EngineCall,
    response_format: ResponseFormat,
    options: ResponseOptions,
) -> Response:
    """Answers a request. If the client closes its connection, cancels the answers and raises
    ClientGone."""
    server.check_model(options.model)
    if server.settings.log_prompts:
        logger.info("%s prompts %r", request.state.request_id, call.prompts)
    caller: Tenant = request.state.tenant
    state = request.state
    opening = open_answers(server, caller.name, state.request_id, call, state.received)
    answers = await unless_gone(request.receive, opening)
    if not options.stream:
        async with answers:
            whole = _whole(server, answers, response_format, options)
            return await unless_gone(request.receive, whole)
    try:
        first = await unless_gone(request.receive, answers.begin())
    except BaseException:
        await answers.aclose()
        raise
    return LiveResponse(
        _events(server, answers, response_format, options, request.state.request_id),
        "text/event-stream; charset=utf-8",
        headers(first),
    )


async def _whole(
    server: ServerState,
    answers: Answers,
    response_format: ResponseFormat,
    options: ResponseOptions,
) -> Response:
    first = await answers.begin()
    await answers.finish()
    choices = [response_format.whole(choice) for choice in answers.choices]
    reports = [await describe(server, choice) for choice in answers.choices]
    if len(choices) > 1:
        choices = [{**one, "kvboost": report} for one, report in zip(choices, reports, strict=True)]
    body = {
        **_head(response_format.id_prefix, response_format.whole_object, options.model),
        "choices": choices,
        "usage": usage(answers),
        "kvboost": reports[0],
    }
    return JSONResponse(body, headers=headers(first))


async def _events(
    server: ServerState,
    answers: Answers,
    response_format: ResponseFormat,
    options: ResponseOptions,
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    head = _head(response_format.id_prefix, response_format.chunk_object, options.model)
    if options.include_usage:
        head["usage"] = None  # in every chunk but the last

    def chunk(choice: dict[str, Any], **more: Any) -> bytes:
        return event({**head, "choices": [choice], **more})

    async with answers:
        try:
            for choice in answers.choices:
                if (opening := response_format.opening(choice)) is not None:
                    yield chunk(opening)
            running = len(answers.choices)
            async for choice, piece in answers:
                if piece is not None:
                    for one in response_format.piece(choice, piece):
                        yield chunk(one)
                    continue
                running -= 1
                *others, closing = response_format.closing(choice)
                for one in others:
                    yield chunk(one)
                if len(answers.choices) > 1:
                    closing["kvboost"] = await describe(server, choice)
                more = {}
                if not running and not options.include_usage:
                    more["kvboost"] = await describe(server, answers.choices[0])
                yield chunk(closing, **more)
            if options.include_usage:
                report = await describe(server, answers.choices[0])
                yield event({**head, "choices": [], "usage": usage(answers), "kvboost": report})
            yield DONE
        except Exception as error:  # the status has been sent; clients look for "error"
            with_message = server.settings.log_prompts
            yield event(answer_to(error, request_id, with_message=with_message).body())


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"kvboost-{kvboost.__version__}",
    }
