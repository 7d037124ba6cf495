"""``kvboost explain``: why each part of some requests would or would not be reused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvboost.api_client import ApiClient
from kvboost.cli import common
from kvboost.cli.explained_requests import Asked, read_requests
from kvboost.config import DEFAULT_MODEL, GenerationMode, choose
from kvboost.results import Explanation

Explain = Callable[[Asked, "str | None"], Explanation]
"""Serves a request, explains it, and reads the answer that a later request holds, if any."""


@common.expanded
def explain(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The requests; - reads standard input.")
    ],
    model: common.Model = DEFAULT_MODEL,
    url: Annotated[
        str | None, common.told("Ask this server of kvboost serve, which has a model and a cache.")
    ] = None,
    api_key: Annotated[
        str | None, common.told("The server's key, if it needs one.", envvar="KVBOOST_KEY")
    ] = None,
    mode: common.Mode = "chunk_kv_reuse",
    *,
    loading: common.Loading,
    as_json: common.AsJson = False,
) -> None:
    """Show why each part of a prompt would or would not be reused, and which edit is to blame.

    FILE is a prompt as plain text, or requests as JSON, one a line, in the order in which they are
    sent, such as the turns of an agent: {"messages": [...]} as for /v1/chat/completions,
    {"prompt": "..."}, or {"input": "...", "output": "..."} of a recording.

    The requests are served one after the other, each for one token; an answer that the next request
    holds is read, too. So each is shown as it would be served after those before it. With --url a
    server does this, and keeps the text in its cache as that of any request.

    Example: [bold]kvboost explain turns.jsonl[/bold]
    """
    explained = []
    with common.errors():
        choose(GenerationMode, mode, "mode")
        requests = read_requests(file, sys.stdin.read)
        serving = _local(model, mode, loading) if url is None else _server(url, api_key, mode)
        with serving as serve_one:
            for request, following in zip_longest(requests, requests[1:]):
                found = serve_one(request, request.answer_before(following))
                explained.append({"line": request.line, **found.as_dict()})
                if not as_json:
                    _show(request, len(requests), found, common.out)
    if as_json:
        common.print_json(explained)


@contextmanager
def _local(model: str, mode: str, loading: common.Loading) -> Iterator[Explain]:
    with common.load_engine(model, loading) as engine:
        busy = Console(stderr=True)

        def serve_one(request: Asked, answer: str | None) -> Explanation:
            with busy.status(f"reading {request.name}"):
                ids = engine.encode(request.prompt())
                options = {"cache_salt": request.cache_salt}
                result = engine.generate(ids, 1, mode, **options)
                explanation: Explanation = result.explain()
                if answer:
                    said = engine.encode(answer, add_special_tokens=False)
                    engine.generate([*ids, *said], 1, mode, **options)
            return explanation

        yield serve_one


@contextmanager
def _server(url: str, api_key: str | None, mode: str) -> Iterator[Explain]:
    server = ExplainingServer(url, api_key, mode)
    busy = Console(stderr=True)

    def serve_one(request: Asked, answer: str | None) -> Explanation:
        with busy.status(f"asking about {request.name}"):
            explanation = server.explain(request.body())
            if answer:
                server.ask(request.body(answer))
        return explanation

    yield serve_one


def _show(request: Asked, total: int, explanation: Explanation, console: Console) -> None:
    from kvboost.cli.demo import legend_of, painted  # imports benchmarks' texts

    if total > 1:
        console.print(Text(f"── {request.name} ", style="bold"), highlight=False)
    shown = [
        Text(explanation.title),
        painted(explanation.map),
        *map(Text, explanation.pointer),
        legend_of(explanation.map),
        *map(Text, explanation.details),
        Text(),
    ]
    console.print(Text("\n").join(shown), highlight=False, soft_wrap=True)


class ExplainingServer:
    """A server at ``url``. Requests are answered with one token."""

    def __init__(self, url: str, api_key: str | None, mode: str) -> None:
        self._api = ApiClient(url, api_key, "kvboost serve")
        self._mode = mode
        models = self._api.send("/v1/models")
        with self._api.understood():
            self._model = str(models["data"][0]["id"])

    def explain(self, body: dict[str, Any]) -> Explanation:
        """Has a request answered, and the answer explained."""
        shown = self._api.send(f"/kvboost/explain/{self.ask(body)}")
        with self._api.understood():
            return Explanation.from_dict(shown["explanations"][0])

    def ask(self, body: dict[str, Any]) -> str:
        """Has a request answered; returns the id of the answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        limits = ("max_tokens", "max_completion_tokens", "n")
        given = {name: value for name, value in body.items() if name not in limits}
        asked = {**given, "model": self._model, "max_tokens": 1, "stream": False}
        answer = self._api.send(path, {**asked, "kvboost": {"mode": self._mode}})
        with self._api.understood():
            return str(answer["id"])
