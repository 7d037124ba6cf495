"""Sending a request on to an upstream, and its answer back; the models of all upstreams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

import httpx
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvboost.deploy import models
from kvboost.deploy.answers import (
    Answer,
    Whole,
    answer_headers,
    long_list,
    no_answer,
    none_left,
    not_sent,
)
from kvboost.deploy.connections import read_up_to
from kvboost.deploy.metrics import reported_tokens
from kvboost.deploy.requests import Forwarded, end_to_end, read_request
from kvboost.deploy.router import Flight
from kvboost.deploy.state import RouteState
from kvboost.deploy.upstreams import CHECK_SECONDS
from kvboost.serve.errors import ApiError, ClientGone, timed_out
from kvboost.serve.http.streaming import unless_gone

logger = logging.getLogger("kvboost.route")

MAX_HELD = 64 * 1024
"""Bytes of a refusal that is kept while another upstream is tried. A longer one is the answer."""
MAX_LOST = 2
"""Upstreams that a request may be lost with. Perhaps it is the request that ends them."""
REFUSALS = (429, 503)
"""Statuses of an upstream that has not taken a request; another one may."""


class Forward:
    """Sends requests on. An ASGI application."""

    def __init__(self, state: RouteState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        answer = Answer(send)
        try:
            request = await read_request(Request(scope, receive), self._state)
            await unless_gone(receive, self._answer(request, answer))
        except ClientGone:
            pass
        except ApiError as error:
            self._state.metrics.answered("", error.status)
            answer.status = error.status
            await error.response()(scope, receive, send)
        finally:
            took, place = (time.perf_counter() - began) * 1e3, (scope["method"], scope["path"])
            whither = (answer.upstream or "-", answer.reason or "-")
            told = (*place, answer.status or "gone", took, *whither)
            logger.info("%s %r %s %.0f ms %s %s", *told)

    async def _answer(self, request: Forwarded, answer: Answer) -> None:
        if request.method == "GET" and request.path in models.LISTS:
            await _list_models(self._state, request, answer)
        else:
            await self._forward(request, answer, await self._serving(request.sketch.model))

    async def _serving(self, model: str) -> Collection[str]:
        """The upstreams that have ``model``. Raises ApiError 404 if none has it."""
        upstreams = self._state.upstreams
        if not (serving := upstreams.serving(model)):
            await upstreams.ask_models()  # perhaps it was loaded a moment ago
            serving = upstreams.serving(model)
        if not serving:
            raise models.not_served(model, upstreams.models.values())
        return serving

    async def _forward(self, request: Forwarded, answer: Answer, serving: Collection[str]) -> None:
        """Tries the upstreams ``serving`` the model, the best one first, until one answers."""
        state = self._state
        tried: set[str] = set()
        lost = 0
        refusal: Whole | None = None
        failure: ApiError | None = None
        while True:
            usable = [one for one in state.upstreams.usable if one in serving and one not in tried]
            ranks = state.router.rank(request.sketch, usable)
            if not ranks:
                break
            choice = ranks[0]
            if not tried:
                state.metrics.routed(choice)
            answer.reason = "retry" if tried else choice.reason
            tried.add(choice.upstream)
            flight = state.router.send(choice, request.sketch)
            try:
                refusal = await self._try(request, flight, answer)
            except _NoAnswer as failed:
                if failed.error is not None:
                    lost, failure = lost + 1, failed.error
                    if lost >= (MAX_LOST if request.may_repeat else 1):
                        raise failure from None
                continue
            finally:
                flight.end(was_read=answer.was_read)
            if refusal is None:
                return
        if refusal is None:
            raise failure or none_left(state)
        state.metrics.answered(refusal.upstream, refusal.status)
        await answer.send(refusal)

    async def _try(self, request: Forwarded, flight: Flight, answer: Answer) -> Whole | None:
        """Has one upstream answer. Returns its refusal, if that is all it says and it is short.
        Raises _NoAnswer if another one should be tried."""
        state, upstream = self._state, flight.upstream
        try:
            response = await state.connections.handle_async_request(request.to(upstream))
            try:
                status, pieces = response.status_code, response.aiter_raw()
                if _is_refusal(request, status):
                    held, is_whole = await read_up_to(MAX_HELD, pieces)
                    if status != 404:
                        state.upstreams.refused(upstream)
                    if is_whole:
                        state.metrics.retry(upstream, str(status))
                        return Whole(upstream, status, answer_headers(response), held)
                    pieces = _joined(held, pieces)
                answer.was_read = response.is_success
                flight.answering()
                self._learn(flight, response)
                await self._pass_on(upstream, response, pieces, answer)
            finally:
                await response.aclose()
        except httpx.LocalProtocolError:  # the client's mistake
            raise not_sent() from None
        except httpx.TransportError as error:
            answer.was_read = False
            if not isinstance(error, httpx.ReadTimeout):
                state.upstreams.failed(upstream, error)
            if not answer.status:
                raise self._no_answer(request, upstream, error) from None
            logger.warning("upstream %s did not finish an answer: %s", upstream, error)
            state.metrics.lost(upstream)
            await answer.break_off()
        return None

    def _no_answer(
        self, request: Forwarded, upstream: str, error: httpx.TransportError
    ) -> _NoAnswer | ApiError:
        """The next step if the client has seen nothing of an answer that failed."""
        if isinstance(error, httpx.ReadTimeout):
            return timed_out(self._state.options.timeout)
        self._state.metrics.retry(upstream, type(error).__name__)
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return _NoAnswer(None)
        return _NoAnswer(no_answer(upstream, error, may_repeat=request.may_repeat))

    def _learn(self, flight: Flight, response: httpx.Response) -> None:
        """Compares what was expected with what the answer says, if it does."""
        self._state.metrics.reported(response.headers)
        exact = reported_tokens(response.headers, "exact")
        if exact is not None:
            flight.found(exact)

    async def _pass_on(
        self, upstream: str, response: httpx.Response, pieces: AsyncIterator[bytes], answer: Answer
    ) -> None:
        """Sends the answer, whose body is ``pieces``. The head goes with the first piece: until
        then, another upstream can answer. If the answer gives its length, the last piece goes with
        the end: a client that has all of an answer may send its next request at once."""
        status, headers = response.status_code, answer_headers(response)
        has_length, last = "content-length" in response.headers, b""

        async def begin() -> None:
            if not answer.status:
                self._state.metrics.answered(upstream, status)
                await answer.begin(upstream, status, headers)

        async for piece in pieces:
            if has_length:
                piece, last = last, piece
            if piece:
                await begin()
                await answer.piece(piece)
        await begin()
        await answer.end(last)


def _is_refusal(request: Forwarded, status: int) -> bool:
    """Whether another upstream may answer. One that says 404 may not have the model, which nobody
    knows if it does not list its models; or not have the response that is to be continued. A
    gateway that says 502 may have lost a server that has done what the request asks for."""
    if status == 404:
        return bool(request.sketch.model) and request.may_repeat
    return status in REFUSALS or (status == 502 and request.may_repeat)


async def _joined(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in others:
        yield piece


class _NoAnswer(Exception):
    """An upstream gave no answer; another one may. ``error`` is what the client is told if none
    does and the upstream may have seen the request."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__()
        self.error = error


async def _list_models(state: RouteState, request: Forwarded, answer: Answer) -> None:
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
