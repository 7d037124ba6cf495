"""Requests as they are sent on.

A path is sent on exactly as it arrived. So it must mean the same to everyone on the way: to
clients and proxies that remove dot segments, to servers that decode it, and to servers that decode
it twice.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes
from uuid import uuid4

import httpx
from starlette.datastructures import Headers
from starlette.requests import Request

from kvboost.deploy import models
from kvboost.deploy.content import NOTHING, Sketch, sketch, tenant_of
from kvboost.deploy.state import RouteState
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import receive_body
from kvboost.serve.http.json_text import JsonBudget, JsonTextError
from kvboost.serve.http.problems import shown

FORWARDED = (b"/v1/", b"/api/")
"""The beginnings of paths that are sent on: OpenAI's and Anthropic's APIs, and Ollama's."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SAFE = r"A-Za-z0-9_~!$&'()*+,=:@.-"
_ARRIVED = re.compile(rf"(?:/|[{_SAFE}]|%[0-9A-Fa-f]{{2}})*".encode())
_DECODED = re.compile(rf"/(?:(?![. ]+(?:/|$))(?:[ {_SAFE}]|[^\x00-\x7f])+(?:/|$))*")
"""Segments that are not empty and not dots alone. The last one may be empty."""

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
        named = path.removeprefix(f"{models.PATH}/")  # the model that a path asks about
        seen = Sketch(model=named if named != path else "")
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


def is_plain(raw: bytes) -> bool:
    """Whether a path means the same however often it is decoded and normalised: no dot segments, no
    empty segments, no backslashes, semicolons, percent signs or control characters, neither as
    they are nor encoded. ``org%2Fmodel`` is plain: decoded once or not, it names the same model."""
    if not _ARRIVED.fullmatch(raw):
        return False
    try:
        decoded = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    decoded = unicodedata.normalize("NFKC", decoded)  # some servers turn wide dots into dots
    return decoded.isprintable() and _DECODED.fullmatch(decoded) is not None


def check_target(method: str, raw: bytes) -> None:
    """Raises ApiError unless a request can be sent on. ``raw`` is its path as it arrived."""
    if method not in METHODS:
        known = ", ".join(METHODS)
        said = f"the router does not forward {shown(method)}; it forwards {known}"
        raise ApiError(405, said, "method_not_allowed", headers={"allow": known})
    if not (is_plain(raw) and raw.startswith(FORWARDED)):
        raise not_plain(raw)


def not_plain(raw: bytes) -> ApiError:
    return ApiError(
        400,
        f"the path {shown(raw.decode('latin-1'))} can be read in more than one way. Send a path "
        "that begins with /v1/ or /api/, without . or .. or empty segments, \\, ;, and % or "
        "control characters that are encoded",
        code="ambiguous_path",
    )
