"""Limits that a request meets before its body is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.serve.auth import Tenant
from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown
from kvboost.serve.settings import ServerSettings

_READING = ("GET", "HEAD", "OPTIONS")
ALWAYS_SERVED = ("/health", "/ready")
"""Orchestrators restart a server that does not answer these. They take no time."""


class HeadLimits:
    """Refuses large headers, host names that are not the server's, and what web pages of others
    send from a browser without being allowed to."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        settings = self._settings
        framing = 4  # a colon, a blank and the end of the line
        size = sum(len(name) + len(value) + framing for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > (most := settings.max_header_bytes):
            said = f"the headers have {size:,} bytes; at most {most:,} are allowed"
            return ApiError(431, said, "headers_too_large")
        headers = dict(scope["headers"])
        origin = None if scope["method"] in _READING else foreign_origin(headers)
        if origin is not None and not {origin, "*"} & {*settings.cors_origins}:
            said = f"web pages of {shown(origin)} may not use this server"
            told = f"{said}; start it with --cors-origin to allow them"
            return ApiError(403, told, "origin_not_allowed")
        if settings.allowed_hosts:
            host = headers.get(b"host", b"").decode("latin-1")
            if _host_name(host) not in settings.allowed_hosts:
                said = f"this server does not answer to the host name {shown(host)}"
                told = f"{said}; start it with --allow-host to add it"
                return ApiError(403, told, "host_not_allowed")
        return None


def foreign_origin(headers: Mapping[bytes, bytes]) -> str | None:
    """The origin of the web page that sent a request, if it is not the server's own; None if it is,
    or if no browser sent it. Browsers ask before most requests of other pages, but not before
    one whose body is plain text."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1")
    if site:
        return None if site in ("same-origin", "none") else origin or site
    host = headers.get(b"host", b"").decode("latin-1")
    return None if not origin or origin.partition("://")[2] == host else origin


class OpenRequests:
    """Limits how many requests are open at once. Requests without a tenant (the page, metrics,
    unknown paths) are counted separately, so that they cannot take the places of those with a
    key. A tenant among others may have half of the places."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._limits = {True: settings.max_requests, False: settings.max_anonymous_requests}
        self._open: Counter[bool] = Counter()
        self._most_of_one = max(1, settings.max_requests // 2)
        self._of_one: Counter[str] = Counter()
        """Open requests by tenant, of tenants among others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_SERVED:
            await self._app(scope, receive, send)
            return
        tenant: Tenant | None = scope.get("state", {}).get("tenant")
        has_tenant, name = tenant is not None, tenant.counts_as if tenant is not None else ""
        if (error := self._refusal(has_tenant, name)) is not None:
            await error.response()(scope, receive, send)
            return
        self._open[has_tenant] += 1
        self._of_one[name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[has_tenant] -= 1
            self._of_one[name] -= 1
            if not self._of_one[name]:
                del self._of_one[name]

    def _refusal(self, has_tenant: bool, name: str) -> ApiError | None:
        if name and self._of_one[name] >= self._most_of_one:
            status, kind = 429, "rate_limit_error"
            said = (
                f"{self._of_one[name]} requests of this key are open, as many as one key may have"
            )
        elif self._open[has_tenant] >= self._limits[has_tenant]:
            status, kind = 503, "server_error"
            said = f"{self._open[has_tenant]} requests are open, as many as this server allows"
        else:
            return None
        headers = {"retry-after": "1"}
        return ApiError(status, said, "too_many_requests_open", kind=kind, headers=headers)


def _host_name(host: str) -> str:
    """A ``Host`` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower()


EXPOSED = (
    *("x-request-id", "retry-after", "x-kvboost-ttft-ms"),
    *(f"x-kvboost-{kind}-tokens" for kind in ("exact", "moved", "recomputed", "computed")),
)
"""Headers of responses that scripts of other origins may read."""
