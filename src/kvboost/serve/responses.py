"""From a request's answers to one response: whole, or streamed as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvboost
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
        """Before the first piece."""

    def piece(self, choice: Choice, text: str) -> dict[str, Any]: ...

    def closing(self, choice: Choice) -> dict[str, Any]:
        """Behind the last piece, with the finish reason."""

    def whole(self, choice: Choice) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ResponseOptions:
    """How a request wants its answers."""

    model: str
    stream: bool
    include_usage: bool


def delivery(body: Generation) -> ResponseOptions:
    options = body.stream_options
    return ResponseOptions(body.model, bool(body.stream), bool(options and options.include_usage))


def make_ask(
    serving: ServerState,
    tenant: Tenant,
    body: Generation,
    prompts: Any,
    max_tokens: int | None,
    logprobs: int | None,
) -> EngineCall:
    """What ``body`` wants of the engine. Raises ApiError 400 on more answers than the engine could
    ever take."""
    n, queue = body.n or 1, serving.engine.serving_stats()
    limit = queue["max_waiting"] + queue["max_running"]
    if n * len(prompts) > limit:
        raise ApiError(
            400,
            f"{len(prompts)} prompts and n={n} make {n * len(prompts)} answers; this server takes "
            f"{limit} at a time",
            code="too_many_answers",
            param="n" if n > 1 else "prompt",
        )
    bias = body.logit_bias
    given = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "stop": body.stop,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": None if bias is None else {int(key): bias[key] for key in bias},
        "logprobs": logprobs,
        "recompute_strategy": body.kvboost.strategy,
        "recompute_ratio": body.kvboost.ratio,
    }
    return EngineCall(
        prompts,
        n,
        max_tokens,
        body.kvboost.mode or serving.settings.mode,
        tenant.salt(body.cache_salt),
        body.seed,
        {name: value for name, value in given.items() if value is not None},
        body.kvboost.explain,
    )


async def respond(
    request: Request, ask: EngineCall, shape: ResponseFormat, how: ResponseOptions
) -> Response:
    """Answers a request. Whoever hangs up is not answered: ClientGone, and nothing runs on."""
    serving: ServerState = request.app.state.serving
    serving.check_model(how.model)
    if serving.settings.log_prompts:
        logger.info("%s prompts %r", request.state.request_id, ask.prompts)
    tenant: Tenant = request.state.tenant
    opening = open_answers(serving, tenant.name, ask, request.state.received)
    answers = await unless_gone(request.receive, opening)
    if not how.stream:
        async with answers:
            return await unless_gone(request.receive, _whole(serving, answers, shape, how))
    try:
        first = await unless_gone(request.receive, answers.begin())
    except BaseException:
        await answers.aclose()
        raise
    return LiveResponse(
        _events(serving, answers, shape, how, request.state.request_id),
        "text/event-stream; charset=utf-8",
        serving.settings.write_seconds,
        headers(first),
    )


async def _whole(
    serving: ServerState, answers: Answers, shape: ResponseFormat, how: ResponseOptions
) -> Response:
    first = await answers.begin()
    await answers.finish()
    choices = [shape.whole(choice) for choice in answers.choices]
    reports = [await describe(serving, choice) for choice in answers.choices]
    if len(choices) > 1:
        choices = [{**one, "kvboost": report} for one, report in zip(choices, reports, strict=True)]
    body = {
        **_head(shape.id_prefix, shape.whole_object, how.model),
        "choices": choices,
        "usage": usage(answers),
        "kvboost": reports[0],
    }
    return JSONResponse(body, headers=headers(first))


async def _events(
    serving: ServerState,
    answers: Answers,
    shape: ResponseFormat,
    how: ResponseOptions,
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    head = _head(shape.id_prefix, shape.chunk_object, how.model)
    if how.include_usage:
        head["usage"] = None  # in every chunk but the last

    def chunk(choice: dict[str, Any], **more: Any) -> bytes:
        return event({**head, "choices": [choice], **more})

    async with answers:
        try:
            for choice in answers.choices:
                if (opening := shape.opening(choice)) is not None:
                    yield chunk(opening)
            running = len(answers.choices)
            async for choice, piece in answers:
                if piece is not None:
                    yield chunk(shape.piece(choice, piece))
                    continue
                running -= 1
                closing = shape.closing(choice)
                if len(answers.choices) > 1:
                    closing["kvboost"] = await describe(serving, choice)
                more = {}
                if not running and not how.include_usage:
                    more["kvboost"] = await describe(serving, answers.choices[0])
                yield chunk(closing, **more)
            if how.include_usage:
                report = await describe(serving, answers.choices[0])
                yield event({**head, "choices": [], "usage": usage(answers), "kvboost": report})
            yield DONE
        except Exception as error:  # the status is sent; clients look for "error" in the data
            with_message = serving.settings.log_prompts
            yield event(answer_to(error, request_id, with_message=with_message).body())


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"kvboost-{kvboost.__version__}",
    }
