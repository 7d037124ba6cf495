"""Errors in the form that the clients of an API expect: OpenAI's, unless the path is of another."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvboost import errors
from kvboost.serve.http.problems import describe, place, short, shown

logger = logging.getLogger("kvboost.serve")

INVALID = "invalid_request_error"
LONGEST_MESSAGE = 4096
"""Errors of the engine may repeat what was sent, such as a path."""

_FIELDS = {
    "template_options": "chat_template_kwargs",
    "min_new_tokens": "min_tokens",
    "include_stop": "include_stop_str_in_output",
}
"""Options of the engine that a request's body has under another name."""


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    **dict.fromkeys((408, 504), "timeout_error"),
    **dict.fromkeys((500, 503), "server_error"),
}
_OF_ENGINE: dict[type[errors.KVBoostError], tuple[int, str, str | None]] = {
    errors.KVTooLargeError: (413, "kv_bytes_exceeded", "prompt"),
    errors.ForgetError: (500, "not_forgotten", None),
    errors.UnknownAdapterError: (404, "model_not_found", "model"),
    errors.AdapterNotFoundError: (404, "adapter_not_found", "lora_path"),
    errors.AdapterError: (400, "adapter_refused", "lora_path"),
    errors.PinError: (409, "pins_full", None),
    errors.ImageError: (400, "invalid_image", "messages"),
    errors.PromptError: (400, "invalid_prompt", "prompt"),
}
"""Status, code and field of errors of the engine whose message says all. The first class counts."""


class ApiError(Exception):
    """An error response. ``message`` goes to the client, and never to the log."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        *,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after: int | None = None,
    ) -> None:
        """``kind``: OpenAI's name for what went wrong; by default what the status says.
        ``retry_after``: seconds after which a client should try again."""
        super().__init__(message)
        self.status = status
        self.message = short(message, LONGEST_MESSAGE)
        self.kind = _KINDS.get(status, INVALID) if kind is None else kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    def body(self) -> dict[str, Any]:
        error = {
            "message": _printable(self.message),
            "type": self.kind,
            "param": None if self.param is None else _printable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The error in the form of the API of the path. The log finds it in the state."""
        return _ErrorResponse(self)

    def line(self) -> str:
        """The error as fields of the access log: its code, and the field of the request."""
        param = [] if self.param is None else [f"param={shown(self.param)}"]
        return " ".join([f"code={self.code or self.kind}", *param])


class _ErrorResponse(JSONResponse):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, state = self._error, scope.setdefault("state", {})
        state["refusal"] = error
        if is_anthropic(scope["path"]):
            request_id = state.get("request_id")
            body = error_body(error.status, _printable(error.message), request_id, error.param)
        elif is_ollama(scope["path"]):
            body = {"error": _printable(error.message)}
        else:
            await super().__call__(scope, receive, send)
            return
        await JSONResponse(body, error.status, error.headers)(scope, receive, send)


class ClientGone(Exception):
    """The client closed its connection; no response can reach it."""


def from_engine(error: Exception) -> ApiError:
    """The response to an error of the engine. Of a bug it says only that the server failed."""
    match error:
        case ApiError():
            return error
        case errors.QueueFullError():
            return ApiError(429, str(error), "queue_full", retry_after=max(1, error.retry_after))
        case errors.ContextLengthError():
            return context_exceeded(str(error))
        case errors.ShuttingDownError():
            return shutting_down()
        case errors.RankLostError():
            said = "a process of the model has ended; the server must be started again"
            return ApiError(503, said, "rank_lost")
        case errors.StructuredOutputError():
            return ApiError(400, str(error), "unsupported_format", error.option)
        case errors.ConfigError():
            option, message = _option(str(error)), str(error)
            field = option if option is None else _FIELDS.get(option, option)
            message = message if field == option else f"{field}{message.removeprefix(str(option))}"
            return ApiError(400, message, "invalid_value", field)
    for kind, (status, code, param) in _OF_ENGINE.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), code, param)
    return internal()


def internal() -> ApiError:
    return ApiError(500, "the server failed on this request", "internal_error")


def context_exceeded(message: str) -> ApiError:
    """400, as OpenAI answers: clients recognise a prompt that is too long by this code, LiteLLM by
    the words of OpenAI's message."""
    message = f"this model's maximum context length is exceeded: {message}"
    return ApiError(400, message, "context_length_exceeded", "prompt")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "shutting_down", retry_after=5)


def timed_out(seconds: float | None) -> ApiError:
    limit = "" if seconds is None else f" of {seconds:g} s"
    return ApiError(504, f"the request took longer than its limit{limit}", "timeout")


def log_failure(error: BaseException, request_id: str, *, with_message: bool) -> None:
    """Logs where a request failed; its message, which may hold a prompt, only ``with_message``."""
    where = "".join(traceback.format_tb(error.__traceback__))
    what = f": {error}" if with_message else ""
    logger.error("%s failed with %s%s\n%s", request_id, type(error).__name__, what, where)


def answer_to(error: Exception, request_id: str, *, with_message: bool) -> ApiError:
    """The response to ``error``. If it is a bug, the log says where."""
    answer = from_engine(error)
    if answer.code == "internal_error":
        log_failure(error, request_id, with_message=with_message)
    return answer


async def on_engine_error(request: Request, error: Exception) -> Response:
    with_message = request.app.state.server.settings.log_prompts
    return answer_to(error, request.state.request_id, with_message=with_message).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, wrong methods, and what the framework itself refuses."""
    assert isinstance(error, HTTPException)
    path, headers = short(request.url.path), dict(error.headers or {})
    match error.status_code:
        case 404:
            message = f"there is no {path} here; {_listed(request.app.state.endpoints)}"
        case 405:
            message = f"{request.method} is not allowed on {path}"
            if allowed := _allowed(request.app.state.endpoints, request.url.path):
                headers["Allow"] = ", ".join(allowed)
                message += f"; use {' or '.join(allowed)}"
        case _:
            message = str(error.detail)
    return ApiError(error.status_code, message, kind=INVALID, headers=headers).response()


def _allowed(endpoints: Sequence[APIRoute], path: str) -> list[str]:
    """The methods that a path has. The framework names only those of its first route."""
    return [
        method
        for route in endpoints
        if route.path_regex.match(path)
        for method in sorted(route.methods or ())
    ]


def _listed(endpoints: Sequence[APIRoute]) -> str:
    named = [
        f"{method} {route.path_format}"
        for route in endpoints
        for method in sorted(route.methods or ())
    ]
    return f"the endpoints are {', '.join(named)}"


async def on_invalid(request: Request, error: Exception) -> Response:
    """A wrong parameter of a query. Bodies are checked by ``bodies.py``."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    message = f"{param}: {describe([first])}"
    return ApiError(400, message, "invalid_value", param).response()


async def on_too_much(request: Request, error: Exception) -> Response:
    """A request of another API that has more than a chat request may have, once it is translated
    to one: a result of a tool becomes a message, consecutive calls become one. Any other error of
    this kind is a defect."""
    assert isinstance(error, ValidationError)
    first = error.errors(include_url=False)[0]
    if first["type"] != "too_long":
        raise error
    message = f"as a chat request, {first['loc'][0]} {describe([first])}"
    return ApiError(400, message, "invalid_value").response()


def invalid_body(error: ValidationError, body: object) -> ApiError:
    """Names the first field of ``body`` that is wrong, what is allowed there and what was sent.
    Every list and object in a body is refused at its first wrong item, so there are few problems to
    look at."""
    problems = error.errors(include_url=False)
    first = problems[0]
    param = place(first, body)
    match first["type"]:
        case "goes_with":
            inside, field = "" if param is None else f"{param}.", first["ctx"]["param"]
            message = first["msg"] if param is None else f"{param}: {first['msg']}"
            return ApiError(400, message, "invalid_value", f"{inside}{field}")
        case "missing":
            return ApiError(400, f"{param} is missing", "missing", param)
        case "extra_forbidden":
            message = f"{param} is not a field that this server knows"
            return ApiError(400, message, "unknown_field", param)
        case "none_required":
            message = f"{param} is not supported by this server; leave it out"
            return ApiError(400, message, "unsupported_field", param)
        case "too_many":
            message = f"{param or 'the body'} {first['msg']}"
            return ApiError(400, message, "invalid_value", param)
    same = (
        problem
        for problem in problems
        if place(problem, body) == param and problem["type"] != "extra_forbidden"
    )
    message = f"{param or 'the body'}: {describe(same)}"
    return ApiError(400, message, "invalid_value", param)


def _option(message: str) -> str | None:
    """The option that one of our errors is about. Its message begins with ``option=value`` or
    ``option: what exactly=value``."""
    found = re.match(r"([a-z_]+)(?:(?::| of) [^=]*)?=", message)
    return found[1] if found else None


def _printable(text: str) -> str:
    """``text`` without halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


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


def is_ollama(path: str) -> bool:
    """Whether the endpoint at ``path`` is one of Ollama's API."""
    return path.startswith("/api/")
