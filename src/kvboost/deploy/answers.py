"""Answers to clients: an upstream's, passed on, or the router's own errors."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import httpx
from starlette.types import Send

from kvboost.deploy.models import MAX_LIST
from kvboost.deploy.requests import UPSTREAM_HEADER, RawHeaders, end_to_end
from kvboost.deploy.state import RouteState
from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import short
from kvboost.serve.http.streaming import event, line


@dataclass
class Whole:
    """The whole answer of an upstream."""

    upstream: str
    status: int
    headers: RawHeaders
    body: bytes


class Answer:
    """The answer to a client, as far as it was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = b""
        self._headers = httpx.Headers()
        self.upstream = ""
        self.reason = ""
        self.status = 0
        """0 until something was sent."""
        self.was_read = False
        """Whether the upstream has read the prompt."""

    async def begin(self, upstream: str, status: int, headers: RawHeaders) -> None:
        self.upstream, self.status, self._headers = upstream, status, httpx.Headers(headers)
        named = (UPSTREAM_HEADER.encode(), upstream.encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, named]}
        )

    async def piece(self, data: bytes) -> None:
        self._last = (self._last + data)[-2:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def send(self, whole: Whole) -> None:
        await self.begin(whole.upstream, whole.status, whole.headers)
        await self.end(whole.body)

    async def break_off(self) -> None:
        """Tells the client that the answer is not complete. If it cannot be told in the answer, the
        connection closes before the announced end."""
        parting = farewell(self._headers.get("content-type", ""), self._last)
        if parting is not None and "content-length" not in self._headers:
            await self.end(parting)


def answer_headers(response: httpx.Response) -> RawHeaders:
    """The headers of an upstream's answer that go to the client."""
    dropped = {"date", UPSTREAM_HEADER}
    if response.status_code in (204, 304):
        dropped.add("content-length")  # they have no body
    return end_to_end(response.headers.raw, dropped)


def farewell(content_type: str, last: bytes) -> bytes | None:
    """The end to send when an upstream is lost in an answer that ended in ``last`` so far: an error
    event or line, if the answer is a stream and its last event or line is complete. None: close the
    connection before the announced end, so that no client takes the answer for complete."""
    error = _bad_gateway(
        "the upstream was lost while it answered; send the request again", "upstream_lost"
    )
    if content_type.startswith("text/event-stream") and last in (b"", b"\n\n"):
        return event(error.body())
    if content_type.startswith("application/x-ndjson") and last[-1:] in (b"", b"\n"):
        return line({"error": error.message})
    return None


def not_sent() -> ApiError:
    """The error of a request that cannot be sent on to any upstream."""
    return ApiError(400, "this request cannot be sent on: it is not valid HTTP")


def none_left(state: RouteState) -> ApiError:
    states = state.upstreams.states
    told = ", ".join(
        f"{sum(one == kind for one in states.values())} {kind}"
        for kind in sorted(set(states.values()))
    )
    said = f"no upstream can take this request now ({told}); try again"
    seconds = max(1, ceil(state.options.health_seconds))
    return ApiError(503, said, "no_upstream", retry_after=seconds)


def long_list(upstream: str) -> ApiError:
    """The error of a list of models that is too long to be joined with others."""
    told = f"the list of models of {upstream} has more than {MAX_LIST:,} bytes"
    return _bad_gateway(f"{told}; ask that server itself", "bad_upstream")


def no_answer(upstream: str, error: httpx.TransportError, *, may_repeat: bool) -> ApiError:
    """The error of a request that an upstream may have seen and did not answer."""
    advice = (
        "send the request again" if may_repeat else "look what it has done before you send it again"
    )
    if isinstance(error, httpx.RemoteProtocolError):
        told = f"the upstream {upstream} gave an answer that cannot be passed on"
        return _bad_gateway(f"{told} ({short(str(error), 200)}); {advice}", "bad_upstream")
    return _bad_gateway(
        f"the upstream {upstream} was lost before it answered; {advice}", "upstream_lost"
    )


def _bad_gateway(message: str, code: str) -> ApiError:
    return ApiError(502, message, kind="server_error", code=code)
