"""The OpenAPI document: the errors of each route, and what FastAPI cannot know."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

import kvboost
from kvboost.serve.errors import ApiError, is_anthropic, is_ollama
from kvboost.serve.http.problems import shown
from kvboost.serve.schema import replies
from kvboost.serve.schema.fields import BIASED_ID, TOKEN_ID, OwnBody
from kvboost.serve.server import ServerState

F = TypeVar("F", bound=Callable[..., Any])

_SAID = {
    400: "A field is wrong, unknown or not supported; `param` names it",
    401: "No key, or an invalid one",
    403: "The key or the host name does not allow this",
    404: "There is no such thing",
    408: "The body did not arrive in time",
    409: "There is no room for it; the message has the numbers",
    413: "The body, or the KV of the prompt, is too large; the message has the numbers",
    415: "The body is not JSON",
    429: "The queue is full; `Retry-After` says when to try again",
    431: "The headers are too large",
    500: "The server failed",
    503: "The server is shutting down, or too many requests are open",
    504: "The request took too long",
}

_WITH_MODEL = (
    *("ChatRequest", "CompletionRequest", "ResponseRequest"),
    *("MessagesRequest", "CountTokensRequest"),
    *("OllamaChat", "OllamaGenerate", "ShowRequest"),
)
"""Bodies that name the model."""
_ALWAYS = (403, 431, 500, 503)
_BODY = (400, 408, 413, 415)
_OF_ANSWERS = (404, 413, 429, 503, 504)


def _header(kind: str, said: str) -> dict[str, Any]:
    return {"description": said, "schema": {"type": kind}}


_HEADERS = {"x-request-id": _header("string", "Names this request in the server's log")}
_REUSE_HEADERS = {
    "x-kvboost-ttft-ms": _header("number", "Milliseconds to the first token"),
    "x-kvboost-exact-tokens": _header("integer", "Prompt rows from the cache, exact"),
    "x-kvboost-moved-tokens": _header("integer", "Prompt rows reused from another position"),
    "x-kvboost-recomputed-tokens": _header("integer", "Moved prompt rows that were computed again"),
    "x-kvboost-computed-tokens": _header("integer", "Prompt rows that were not in the cache"),
}


def errors(
    *statuses: int, has_body: bool = True, model: type[replies.Reply] = replies.ErrorReply
) -> dict[int | str, dict[str, Any]]:
    """Documents ``statuses`` in addition to those that every route has."""
    all_of_them = {*statuses, *_ALWAYS, *(_BODY if has_body else ())}
    return {
        status: {"model": model, "description": _SAID[status]} for status in sorted(all_of_them)
    }


def streamed(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Documents that the response may be a stream of ``media_type``, with headers about reuse."""
    return {200: {"content": {media_type: {}}, "headers": dict(_REUSE_HEADERS)}}


class Router(APIRouter):
    """A router whose endpoints say their errors."""

    def __init__(
        self,
        error: type[replies.Reply] = replies.ErrorReply,
        stream_type: str = "text/event-stream",
        **options: Any,
    ) -> None:
        """``error``: the form of its errors."""
        super().__init__(**options)
        self._error, self._stream_type = error, stream_type

    def endpoint(
        self, place: str, reply: Any, *statuses: int, streams: bool = False, **more: Any
    ) -> Callable[[F], F]:
        """An endpoint at ``place``, a method and a path. ``statuses``: its errors in addition to
        those that every endpoint has. ``streams``: whether it answers prompts, perhaps by
        events."""
        method, _, path = place.partition(" ")
        statuses = (*statuses, *_OF_ANSWERS) if streams else statuses
        responses = errors(*statuses, has_body=method == "POST", model=self._error)
        if not getattr(self.route_class, "needs_json_type", True):
            responses.pop(415, None)
        responses |= streamed(self._stream_type) if streams else {}
        return self.api_route(
            path, methods=[method], response_model=reply, responses=responses, **more
        )


def install(app: FastAPI, server: ServerState) -> None:
    """Makes ``app.openapi`` describe this server: the names of its model, the keys it needs, and no
    422, because it answers 400."""

    making = threading.Lock()

    def openapi() -> dict[str, Any]:
        with making:  # which takes about a second
            if app.openapi_schema is None:
                app.openapi_schema = _document(app, server)
            _name_models(app.openapi_schema, server)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def endpoints(routers: Sequence[APIRouter]) -> list[APIRoute]:
    """The routes that the document lists. It takes far longer to make the document."""
    return [
        route
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ]


def _document(app: FastAPI, server: ServerState) -> dict[str, Any]:
    document = get_openapi(
        title="KVBoost",
        version=kvboost.__version__,
        description="A language model that reuses the text it has read, with OpenAI's API.",
        routes=app.routes,
    )
    schemas = document["components"]["schemas"]
    for name in ("EmbeddingRequest", "RerankRequest", "EmbedRequest", "LegacyEmbedRequest"):
        schemas[name]["properties"]["model"]["enum"] = list(server.embedding_names)
    dimensions = {"enum": [server.embedder.dimensions, None]}
    for name in ("EmbeddingRequest", "EmbedRequest"):
        schemas[name]["properties"]["dimensions"] = dimensions
    _bound_ids(schemas, server.engine.vocab_size)
    own = _names_below(OwnBody)
    for name, schema in schemas.items():
        if schema.get("additionalProperties") is False:  # an object in a request
            _allow_null(schema)
            if not server.settings.strict_fields and name not in own:
                del schema["additionalProperties"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if server.settings.needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        private = path.startswith(server.settings.private_paths)
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if server.settings.needs_key and private:
                operation["security"] = [{"key": []}]
                operation["responses"].setdefault("401", _error(401, path))
            for response in operation["responses"].values():
                response.setdefault("headers", {}).update(_HEADERS)
    return document


def _names_below(kind: type) -> set[str]:
    """The names of all classes that are of this ``kind``."""
    found: list[type] = kind.__subclasses__()
    return {one.__name__ for one in found}.union(*map(_names_below, found))


def _allow_null(schema: dict[str, Any]) -> None:
    """Lets the fields of an object be null, which counts as not given."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


def _name_models(document: dict[str, Any], server: ServerState) -> None:
    """Lists the names that ``model`` may have now: adapters come and go."""
    for name in _WITH_MODEL:
        model = document["components"]["schemas"][name]["properties"]["model"]
        model["enum"] = [*server.names, *server.adapter_names]


def _bound_ids(schema: Any, vocab_size: int) -> None:
    """Adds the size of the vocabulary to all token ids in ``schema``."""
    if isinstance(schema, list):
        for part in schema:
            _bound_ids(part, vocab_size)
    elif isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema["exclusiveMaximum"] = vocab_size
        for key, value in list(schema.items()):
            if value == BIASED_ID:
                schema[key] = f"^({numbers_below(vocab_size)})$"
            elif key == "patternProperties" and BIASED_ID in value:
                value[f"^({numbers_below(vocab_size)})$"] = value.pop(BIASED_ID)
            _bound_ids(value, vocab_size)


def numbers_below(limit: int) -> str:
    """A regular expression of the numbers below ``limit``, as strings of digits."""
    last = str(limit - 1)
    shorter = [f"[0-9]{{1,{len(last) - 1}}}"] if len(last) > 1 else []
    smaller = [
        f"{last[:at]}[0-{int(digit) - 1}][0-9]{{{len(last) - at - 1}}}"
        for at, digit in enumerate(last)
        if digit != "0"
    ]
    return "|".join([*shorter, *smaller, last])


def _error(status: int, path: str) -> dict[str, Any]:
    kind = "Anthropic" if is_anthropic(path) else "Ollama" if is_ollama(path) else ""
    name = f"{kind}ErrorReply"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": _SAID[status], "content": {"application/json": {"schema": schema}}}


def _check(request: Request) -> None:
    """Refuses a repeated parameter: programs differ in which of its values they use."""
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, number in times.items():
        if number > 1:
            said = f"{shown(name)} is given {number} times in the address; give it once"
            raise ApiError(400, said, param=name)


EACH_ONCE = Depends(_check)
