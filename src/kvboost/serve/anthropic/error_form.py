"""Errors in the form that Anthropic's clients expect."""

from __future__ import annotations

from typing import Any

_PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Tells Anthropic's client, whose tool runner asks for a thread, to send whole conversations."""


def is_anthropic(path: str) -> bool:
    """Whether the endpoint at ``path`` is one of Anthropic's API."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def error_body(
    status: int, message: str, request_id: str | None, param: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":
        error["details"] = NO_THREADS
    return {"type": "error", "error": error, "request_id": request_id}
