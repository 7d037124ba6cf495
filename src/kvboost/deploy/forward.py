"""Sending a request on to an upstream, and its answer back."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from math import ceil
from uuid import uuid4

import httpx
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvboost.deploy.content import NOTHING, Sketch, sketch, tenant_of
from kvboost.deploy.metrics import reported_tokens
from kvboost.deploy.router import Flight
from kvboost.deploy.state import RouteState
from kvboost.serve.bodies import receive_body
from kvboost.serve.errors import ApiError, ClientGone, timed_out
from kvboost.serve.json_text import JsonBudget, JsonTextError
from kvboost.serve.streaming import event, unless_gone

logger = logging.getLogger("kvboost.route")

UPSTREAM_HEADER = "x-kvboost-upstream"
MAX_HELD = 64 * 1024
"""Bytes of a refusal that are kept while another upstream is tried."""
MAX_LOST = 2
"""Upstreams that a request may be lost with. Perhaps it is the request that ends them."""
REFUSALS = (429, 502, 503)
"""Statuses of an upstream that cannot take a request; another one may."""
REPEATABLE = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/messages", "/v1/rerank", "/v1/score"),
)
"""Requests that may be sent again although the first upstream may have seen them."""
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "proxy-connection", "expect"),
}


@dataclass
class _Refusal:
    """The answer of an upstream that could not take a request."""

    upstream: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class _Forwarded:
    """A request to send on."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    sketch: Sketch
    may_repeat: bool
    """Whether it may be sent again after an upstream may have seen it."""

    def to(self, upstream: str) -> httpx.Request:
        return httpx.Request(
            self.method, upstream + self.target, headers=self.headers, content=self.body or None
        )


class Forward:
    """Sends requests on. An ASGI application."""

    def __init__(self, state: RouteState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request, answered = Request(scope, receive), _Answer(send)
        try:
            forwarded = await self._read(request)
            await unless_gone(receive, self._forward(forwarded, answered))
        except ClientGone:
            pass
        except ApiError as error:
            self._state.metrics.answered("", error.status)
            answered.status = error.status
            await error.response()(scope, receive, send)
        finally:
            logger.info(
                "%s %r %s %.0f ms %s %s",
                scope["method"],
                scope["path"],
                answered.status or "gone",
                (time.perf_counter() - began) * 1e3,
                answered.upstream or "-",
                answered.reason or "-",
            )

    async def _read(self, request: Request) -> _Forwarded:
        body = await receive_body(request, self._state.settings)
        raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
        query: bytes = request.scope["query_string"]
        target = (raw + (b"?" + query if query else b"")).decode("latin-1")
        headers = _end_to_end(request.scope["headers"], {"host", "content-length"})
        if "x-request-id" not in request.headers:  # the same in all logs
            headers.append((b"x-request-id", f"req-{uuid4().hex}".encode()))
        method = request.method
        may_repeat = method in ("GET", "HEAD") or request.scope["path"] in REPEATABLE
        return _Forwarded(
            method, target, headers, body, await self._sketch(request, body), may_repeat
        )

    async def _sketch(self, request: Request, body: bytes) -> Sketch:
        if request.method != "POST":
            return NOTHING
        shared = self._state.options.shared_cache
        return await self._state.workers.parse(
            len(body), request_sketch, request.headers, body, shared
        )

    async def _forward(self, request: _Forwarded, answer: _Answer) -> None:
        """Tries upstreams, the best one first, until one of them answers."""
        state = self._state
        tried: set[str] = set()
        lost = 0
        refusal: _Refusal | None = None
        while True:
            usable = [one for one in state.upstreams.usable if one not in tried]
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
            except _Failed as failed:
                lost += failed.may_have_seen_it
                if lost >= (MAX_LOST if request.may_repeat else 1):
                    raise _lost_before_answer(request.may_repeat) from None
                continue
            finally:
                flight.end(was_read=answer.was_read)
            if refusal is None:
                return
        if refusal is not None:
            await answer.begin(refusal.upstream, refusal.status, refusal.headers)
            await answer.end(refusal.body)
            state.metrics.answered(refusal.upstream, refusal.status)
            return
        raise _none_left(state)

    async def _try(self, request: _Forwarded, flight: Flight, answer: _Answer) -> _Refusal | None:
        """Has one upstream answer. Returns its refusal, if that is all it says. Raises _Failed if
        another one should be tried."""
        state, upstream = self._state, flight.upstream
        try:
            response = await state.client.send(request.to(upstream), stream=True)
        except httpx.ReadTimeout:
            raise timed_out(state.options.timeout) from None
        except (httpx.LocalProtocolError, httpx.InvalidURL):  # the client's mistake
            raise ApiError(400, "this request cannot be sent on: it is not valid HTTP") from None
        except httpx.TransportError as error:
            state.upstreams.failed(upstream, error)
            state.metrics.retry(upstream, type(error).__name__)
            sent = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise _Failed(may_have_seen_it=sent) from error
        try:
            if response.status_code in REFUSALS:
                return await self._refusal(upstream, response)
            answer.was_read = response.is_success
            flight.answering()
            self._learn(flight, response)
            await self._pass_on(upstream, response, answer)
            return None
        finally:
            await response.aclose()

    def _learn(self, flight: Flight, response: httpx.Response) -> None:
        """Compares what was expected with what the answer says, if it does."""
        self._state.metrics.reported(response.headers)
        exact = reported_tokens(response.headers, "exact")
        if exact is not None:
            flight.found(exact)

    async def _refusal(self, upstream: str, response: httpx.Response) -> _Refusal:
        body = bytearray()
        try:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_HELD:
                    break
        except httpx.TransportError as error:
            self._state.upstreams.failed(upstream, error)
            raise _Failed(may_have_seen_it=False) from error
        finally:
            self._state.metrics.retry(upstream, str(response.status_code))
        self._state.upstreams.refused(upstream)
        headers = _end_to_end(response.headers.raw, {"content-length", "date", UPSTREAM_HEADER})
        return _Refusal(upstream, response.status_code, headers, bytes(body[:MAX_HELD]))

    async def _pass_on(self, upstream: str, response: httpx.Response, answer: _Answer) -> None:
        await answer.begin(
            upstream,
            response.status_code,
            _end_to_end(response.headers.raw, {"date", UPSTREAM_HEADER}),
        )
        self._state.metrics.answered(upstream, response.status_code)
        try:
            async for piece in response.aiter_raw():
                await answer.piece(piece)
        except httpx.TransportError as error:
            logger.warning("upstream %s did not finish an answer: %s", upstream, error)
            self._state.metrics.lost(upstream)
            if not isinstance(error, httpx.ReadTimeout):
                self._state.upstreams.failed(upstream, error)
            answer.was_read = False
            await answer.break_off(response.headers.get("content-type", ""))
            return
        await answer.end()


class _Failed(Exception):
    """An upstream gave no answer; another one may."""

    def __init__(self, *, may_have_seen_it: bool) -> None:
        super().__init__()
        self.may_have_seen_it = may_have_seen_it


class _Answer:
    """The answer to a client, as far as it was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = b""
        self.upstream = ""
        self.reason = ""
        self.status = 0
        self.was_read = False
        """Whether the upstream has read the prompt."""

    async def begin(self, upstream: str, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.upstream, self.status = upstream, status
        named = (UPSTREAM_HEADER.encode(), upstream.encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, named]}
        )

    async def piece(self, data: bytes) -> None:
        self._last = (self._last + data)[-2:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def break_off(self, content_type: str) -> None:
        """Tells the client that the answer is not complete."""
        parting = farewell(content_type, self._last)
        if parting is not None:
            await self.end(parting)


def request_sketch(headers: Headers, body: bytes, shared_cache: bool) -> Sketch:
    """The sketch of a request; nothing of a body that would take long to parse and that no server
    of ours accepts."""
    try:
        JsonBudget().take(body)
    except JsonTextError:
        return NOTHING
    key = headers.get("authorization") or headers.get("x-api-key")
    tenant = b"" if key is None or shared_cache else tenant_of(key.encode("latin-1"))
    return sketch(body, tenant)


def farewell(content_type: str, last: bytes) -> bytes | None:
    """What to send when an upstream is lost in an answer that ended in ``last`` so far: an error
    event, if the answer is a stream and the last event is complete. None: close the connection
    before the announced end, so that no client takes the answer for complete."""
    if content_type.startswith("text/event-stream") and last in (b"", b"\n\n"):
        return event(_lost_in_answer().body())
    return None


def _end_to_end(headers: list[tuple[bytes, bytes]], without: set[str]) -> list[tuple[bytes, bytes]]:
    """The headers that concern both ends, not only one connection."""
    dropped = _HOP_BY_HOP | without
    for name, value in headers:
        if name.lower() == b"connection":
            dropped |= {one.strip().lower() for one in value.decode("latin-1").split(",")}
    return [
        (name, value) for name, value in headers if name.decode("latin-1").lower() not in dropped
    ]


def _none_left(state: RouteState) -> ApiError:
    states = state.upstreams.states
    told = ", ".join(
        f"{sum(one == kind for one in states.values())} {kind}"
        for kind in sorted(set(states.values()))
    )
    return ApiError(
        503,
        f"no upstream can take this request now ({told}); try again",
        kind="server_error",
        code="no_upstream",
        headers={"retry-after": str(max(1, ceil(state.options.health_seconds)))},
    )


def _lost_before_answer(may_repeat: bool) -> ApiError:
    advice = (
        "send the request again" if may_repeat else "look what it has done before you send it again"
    )
    return ApiError(
        502,
        f"the upstream was lost before it answered; {advice}",
        kind="server_error",
        code="upstream_lost",
    )


def _lost_in_answer() -> ApiError:
    return ApiError(
        502,
        "the upstream was lost while it answered; send the request again",
        kind="server_error",
        code="upstream_lost",
    )
