"""Which web pages may call the server from a browser (CORS)."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

EXPOSED = (
    "x-request-id",
    "retry-after",
    "x-kvboost-ttft-ms",
    "x-kvboost-exact-tokens",
    "x-kvboost-moved-tokens",
    "x-kvboost-recomputed-tokens",
    "x-kvboost-computed-tokens",
)
"""Headers of responses that scripts of other origins may read."""


class Cors(CORSMiddleware):
    """Answers preflight requests and marks responses for pages of ``origins``; ``*`` means any
    page. Keys are in a header, never in cookies, so pages may not send credentials."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's client for browsers sends a dozen of its own
            expose_headers=EXPOSED,
        )
