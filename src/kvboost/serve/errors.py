"""What goes wrong, as OpenAI's clients expect to be told."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.errors import (
    ConfigError,
    ContextLengthError,
    ForgetError,
    KVTooLargeError,
    PromptError,
    QueueFullError,
    ShuttingDownError,
)

logger = logging.getLogger("kvboost.serve")

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error. ``message`` goes to the client, and nowhere else."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error = {
            "message": _printable(self.message),
            "type": self.kind,
            "param": None if self.param is None else _printable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client hung up; whatever is answered, nobody hears it."""


def from_engine(error: Exception) -> ApiError:
    """What the engine raised, or anything else, as an answer; of a bug only that it is one."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            wait = max(1, error.retry_after)
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(wait)},
            )
        case ContextLengthError():
            return ApiError(413, str(error), code="context_length_exceeded", param="prompt")
        case KVTooLargeError():
            return ApiError(413, str(error), code="kv_bytes_exceeded", param="prompt")
        case ShuttingDownError():
            return shutting_down()
        case ForgetError():
            return ApiError(500, str(error), kind="server_error", code="not_forgotten")
        case PromptError():
            return ApiError(400, str(error), code="invalid_prompt", param="prompt")
        case ConfigError():
            return ApiError(400, str(error), code="invalid_value", param=_option(str(error)))
        case _:
            return internal()


def internal() -> ApiError:
    return ApiError(
        500, "the server failed on this request", kind="server_error", code="internal_error"
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down",
        kind="server_error",
        code="shutting_down",
        headers={"retry-after": "5"},
    )


def timed_out(seconds: float | None) -> ApiError:
    limit = "" if seconds is None else f" of {seconds:g} s"
    return ApiError(504, f"the request's time{limit} is over", kind="timeout_error", code="timeout")


def log_failure(error: BaseException, request_id: str, *, with_message: bool) -> None:
    """Where it failed. The message may hold a prompt, so it stays out unless prompts are logged."""
    where = "".join(traceback.format_tb(error.__traceback__))
    what = f": {error}" if with_message else ""
    logger.error("%s failed with %s%s\n%s", request_id, type(error).__name__, what, where)


def answer_to(error: Exception, request_id: str, *, with_message: bool) -> ApiError:
    """``error`` as an answer; what the client is not told goes to the log."""
    answer = from_engine(error)
    if answer.code == "internal_error":
        log_failure(error, request_id, with_message=with_message)
    return answer


async def on_engine_error(request: Request, error: Exception) -> Response:
    with_message = request.app.state.serving.settings.log_prompts
    return answer_to(error, request.state.request_id, with_message=with_message).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, methods, and what the framework itself refuses."""
    assert isinstance(error, HTTPException)
    said = {404: f"there is no {_short(request.url.path)} here", 400: "the body cannot be read"}
    if error.status_code == 405:
        said[405] = f"{request.method} is not allowed on {_short(request.url.path)}"
    message = said.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors(), error.body).response()


def invalid(problems: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """The first field that is wrong, and everything that is wrong with it."""
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "malformed")
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    param = _path(first, body)
    same = [problem for problem in problems if _path(problem, body) == param]
    match first["type"]:
        case "goes_with":
            return ApiError(400, first["msg"], code="invalid_value", param=first["ctx"]["param"])
        case "missing" if param is None:
            return ApiError(400, "the request has no body; send JSON", code="invalid_json")
        case "missing":
            return ApiError(400, f"{param} is missing", code="missing", param=param)
        case "extra_forbidden":
            message = f"{param} is not a field that this server knows"
            return ApiError(400, message, code="unknown_field", param=param)
        case "none_required":
            message = f"{param} is not supported by this server; leave it out"
            return ApiError(400, message, code="unsupported_field", param=param)
    said = dict.fromkeys(_sentence(problem["msg"]) for problem in same)
    return ApiError(
        400, f"{param or 'the body'}: {'; or '.join(said)}", code="invalid_value", param=param
    )


def _path(problem: Mapping[str, Any], body: object) -> str | None:
    """Where in the body a problem is, as ``messages[0].content``. pydantic also names the
    branches of unions it tried; whatever does not lead into the body is left out."""
    source, *parts = problem["loc"]
    if source != "body":
        return ".".join(map(str, parts))
    path, place = "", body
    for number, part in enumerate(parts, start=1):
        if isinstance(place, dict) and part in place:
            path, place = f"{path}.{part}", place[part]
        elif isinstance(place, list) and isinstance(part, int) and part < len(place):
            path, place = f"{path}[{part}]", place[part]
        elif number == len(parts) and problem["type"] == "missing":
            path = f"{path}.{part}"
    return path.removeprefix(".") or None


def _sentence(message: str) -> str:
    for prefix, ours in (("Value error, ", ""), ("Input should be ", "must be ")):
        if message.startswith(prefix):
            return ours + message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


def _option(message: str) -> str | None:
    """Our errors begin with ``option=value``, or ``option: which one=value``."""
    found = re.match(r"([a-z_]+)(?:(?::| of) [^=]*)?=", message)
    return found[1] if found else None


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _printable(text: str) -> str:
    """Without the halves of surrogate pairs that JSON can smuggle in and UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode()
