"""Requests as they are sent on."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import httpx
from starlette.datastructures import Headers
from starlette.requests import Request

from kvboost.deploy import models
from kvboost.deploy.content import NOTHING, Sketch, sketch, tenant_of
from kvboost.deploy.state import RouteState
from kvboost.deploy.targets import check_target
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import receive_body
from kvboost.serve.http.json_text import JsonBudget, JsonTextError

RawHeaders = list[tuple[bytes, bytes]]
UPSTREAM_HEADER = "x-kvboost-upstream"
"""Names the upstream that answered."""
MAX_HEADERS = 256
"""Of a request. Thousands of short ones are larger than an upstream allows once they are sent on,
and it might close the connection, as one that fails does."""
REPEATABLE = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/messages", "/v1/rerank", "/v1/score"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
)
"""Requests that may be sent again although the first upstream may have seen them."""
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "proxy-connection", "expect"),
}


@dataclass
class Forwarded:
    """A request to send on."""

    method: str
    path: str
    """Decoded."""
    target: bytes
    """Path and query as they arrived."""
    headers: RawHeaders
    body: bytes
    sketch: Sketch
    may_repeat: bool
    """Whether it may be sent again after an upstream may have seen it."""

    def to(self, upstream: str) -> httpx.Request:
        url = httpx.URL(upstream)
        return httpx.Request(
            self.method,
            url,
            headers=self.headers,
            content=self.body or None,
            extensions={"target": url.raw_path.rstrip(b"/") + self.target},
        )


async def read_request(request: Request, state: RouteState) -> Forwarded:
    """The request with its whole body. Raises ApiError if it cannot be sent on."""
    method, path = request.method, request.scope["path"]
    raw: bytes = request.scope["raw_path"]
    check_target(method, raw)
    if (number := len(request.scope["headers"])) > MAX_HEADERS:
        said = f"the request has {number:,} headers; at most {MAX_HEADERS} are allowed"
        raise ApiError(431, said, "headers_too_large")
    body = await receive_body(request, state.settings)
    query: bytes = request.scope["query_string"]
    target = raw + (b"?" + query if query else b"")
    headers = end_to_end(request.scope["headers"], {"host", "content-length", UPSTREAM_HEADER})
    if "x-request-id" not in request.headers:  # the same in all logs
        headers.append((b"x-request-id", f"req-{uuid4().hex}".encode()))
    may_repeat = method in ("GET", "HEAD") or path in REPEATABLE
    if method == "POST":
        seen = await state.workers.parse(
            "", len(body), request_sketch, request.headers, body, state.options.shared_cache
        )
    else:
        seen = Sketch(model=models.path_model(path))
    return Forwarded(method, path, target, headers, body, seen, may_repeat)


def request_sketch(headers: Headers, body: bytes, shared_cache: bool) -> Sketch:
    """The sketch of a request; nothing of a body that is too much for servers of ours."""
    try:
        JsonBudget().take(body)
    except JsonTextError:
        return NOTHING
    key = headers.get("authorization") or headers.get("x-api-key")
    tenant = b"" if key is None or shared_cache else tenant_of(key.encode("latin-1"))
    return sketch(body, tenant)


def end_to_end(headers: RawHeaders, without: set[str]) -> RawHeaders:
    """The headers that concern both ends, not only one connection. Blanks around a value are not
    part of it: clients may send them, and h11 refuses to."""
    dropped = _HOP_BY_HOP | without
    for name, value in headers:
        if name.lower() == b"connection":
            dropped |= {one.strip().lower() for one in value.decode("latin-1").split(",")}
    return [
        (name, value.strip(b" \t"))
        for name, value in headers
        if name.decode("latin-1").lower() not in dropped
    ]
