"""``GET /v1/models`` and ``/api/tags`` of the router: the models of all upstreams."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx

from kvboost.deploy import models
from kvboost.deploy.answers import Answer, Whole, answer_headers, long_list, none_left, not_sent
from kvboost.deploy.requests import Forwarded, end_to_end
from kvboost.deploy.state import RouteState
from kvboost.deploy.upstreams import CHECK_SECONDS
from kvboost.serve.errors import ApiError


def asks_for_list(request: Forwarded) -> bool:
    return request.method == "GET" and request.path in models.LISTS


async def list_models(state: RouteState, request: Forwarded, answer: Answer) -> None:
    """Asks all upstreams with the client's own key. Each model is listed once, as the first of them
    describes it. If none of them lists any, the client sees why the first does not."""
    headers = end_to_end(request.headers, {"accept-encoding"})  # lists are parsed here
    question, usable = replace(request, headers=headers), state.upstreams.usable
    answers = await asyncio.gather(*(_ask(state, question, one) for one in usable))
    lists = {
        upstream: found
        for upstream, one in zip(usable, answers, strict=True)
        if (found := _listed(state, request.path, upstream, one)) is not None
    }
    given = [one for one in answers if isinstance(one, Whole)]
    if lists:
        kind = (b"content-type", b"application/json")
        whole = Whole(", ".join(lists), 200, [kind], models.joined(lists.values(), request.path))
    elif given:
        whole = given[0]
    else:
        errors = (one for one in answers if isinstance(one, ApiError))
        raise next(errors, none_left(state))
    state.metrics.answered(whole.upstream, whole.status)
    await answer.send(whole)


async def _ask(state: RouteState, question: Forwarded, upstream: str) -> Whole | ApiError | None:
    """The answer of one upstream, or the error if it is too long; None if none comes. Raises
    ApiError if the client's request cannot be sent."""
    try:
        response, body = await state.connections.fetch(
            question.to(upstream), CHECK_SECONDS, models.MAX_LIST
        )
    except httpx.LocalProtocolError:  # the client's mistake
        raise not_sent() from None
    except httpx.TransportError as error:
        if not isinstance(error, httpx.TimeoutException):
            state.upstreams.failed(upstream, error)
        return None
    if body is None:
        return long_list(upstream)
    return Whole(upstream, response.status_code, answer_headers(response), body)


def _listed(
    state: RouteState, path: str, upstream: str, answer: Whole | ApiError | None
) -> models.Models | None:
    """The models that an upstream lists, or has listed before if it does not answer in time."""
    if answer is None:
        return state.upstreams.models[upstream] if path == models.PATH else None
    if isinstance(answer, ApiError) or answer.status != 200:
        return None
    return models.listed(answer.body, path)
