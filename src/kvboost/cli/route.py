"""``kvboost route``: several servers behind one address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost.cli.common import AllowHost, Host, address, errors, expanded, only_local, option, say
from kvboost.config import install_extra, parse_bytes
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.deploy.state import RouteState
    from kvboost.deploy.upstreams import Upstreams


@dataclass(frozen=True)
class RouteOptions:
    host: Host = "127.0.0.1"
    port: int = option("The port; 0 takes a free one.", 8080, min=0, max=65535)
    policy: str = option(
        "content: to the server that has read the prompt's beginning or its passages; beginning: "
        "for servers that reuse prefixes only, as vLLM does; round-robin: in turn.",
        "content",
    )
    remember: int = option(
        "Tokens of text to remember for each server; best as many as its cache holds.",
        4 * 1024**2,
        min=64,
    )
    request_tokens: int = option(
        "What a running request counts, in prompt tokens, when servers are compared. More spreads "
        "the load, less keeps text together.",
        64,
        min=0,
    )
    shared_cache: bool = option(
        "The servers share cached text between API keys (kvboost serve --shared-cache, or vLLM). "
        "By default text of one key says nothing about another's.",
        False,
    )
    health_seconds: float = option("Seconds between two checks of a server.", 2.0, min=0.05)
    timeout: float = option(
        "Seconds that a server may send nothing; 0 sets no limit.", 600.0, min=0.0
    )
    drain_seconds: float = option(
        "Seconds that running answers get when the router stops.", 30.0, min=0.0
    )
    max_body: str = option("The largest request, such as 8MiB.", "8MiB")
    max_requests: int = option(
        "Requests that may be open at once; more are answered 503.", 512, min=1
    )
    metrics: str = option("open or off: whether /metrics is there.", "open")
    allow_host: AllowHost = None


@expanded
def route(
    upstreams: Annotated[
        list[str],
        typer.Argument(
            metavar="URL",
            help="The servers, such as http://10.0.0.1:8000: KVBoost, vLLM, or any other with "
            "OpenAI's API.",
            show_default=False,
        ),
    ],
    given: RouteOptions,
) -> None:
    """Put one address before several servers, and send each request where its text was read.

    A server reuses only what it has read itself. So the router looks into each prompt: a request
    goes to the server that knows most of its beginning and of its passages, wherever they are in
    the prompt, unless that server is so busy that another one is done sooner. The router keeps no
    text, needs no tokenizer and no database, and can be restarted at any time.

    The servers may serve different models: a request goes to those that list its model, and
    /v1/models lists the models of all. A server that wants a key for its list may get any request.

    Answers pass through unchanged, streams included; the header x-kvboost-upstream names the server
    that answered. Keys pass through too: the servers check them. A server that is down or draining
    gets no requests until it is back; a request that got no answer from it is sent to another one.
    If none is left, the answer is 503 with Retry-After.

    /health: the router runs. /ready: a server is there. /metrics: for Prometheus.

    Example: two servers on this machine, then the router:

      [bold]kvboost serve --port 8001[/bold]

      [bold]kvboost serve --port 8002[/bold]

      [bold]kvboost route http://127.0.0.1:8001 http://127.0.0.1:8002[/bold]
    """
    with errors():
        try:
            from kvboost.deploy.proxy import create_router
            from kvboost.deploy.router import RouterSettings
            from kvboost.deploy.state import ProxySettings
            from kvboost.serve.process import bind, run
            from kvboost.serve.settings import ServerSettings, is_loopback
        except ModuleNotFoundError as error:
            said = f"kvboost route needs {error.name}; {install_extra('serve')}"
            raise ConfigError(said) from None
        if given.metrics not in ("open", "off"):
            raise ConfigError(f"metrics={given.metrics!r} is not available; choose 'open' or 'off'")
        settings = ProxySettings(
            tuple(upstreams),
            RouterSettings(given.policy, given.remember, given.request_tokens),
            shared_cache=given.shared_cache,
            health_seconds=given.health_seconds,
            timeout=given.timeout or None,
            limits=ServerSettings(
                max_body_bytes=parse_bytes(given.max_body, "max_body"),
                max_requests=given.max_requests,
                max_anonymous_requests=given.max_requests,
                max_connections=max(ServerSettings.max_connections, 2 * given.max_requests),
                drain_seconds=given.drain_seconds,
                metrics=given.metrics,
                allowed_hosts=only_local(given.allow_host or ()) if is_loopback(given.host) else (),
            ),
        )
        app = create_router(settings)
        with bind(given.host, given.port) as listening:
            port = listening.getsockname()[1]
            run(app, listening, lambda: _announce(app.state.server, address(given.host, port)))
    say.print("stopped")


def _announce(state: RouteState, url: str) -> None:
    """Says where requests go; on standard output only the address, for scripts."""
    servers = state.upstreams.states
    policy = state.options.router.policy
    say.print(f"routing by {policy} to {len(servers)} servers")
    print(f"{url}/v1", flush=True)
    for upstream, why in state.upstreams.missing.items():
        say.print(f"warning: {upstream} gets no requests yet: {why}", style="yellow")
    _tell_models(state.upstreams)
    if len(servers) == 1:
        say.print("note: with one server there is nothing to choose", style="yellow")


def _tell_models(upstreams: Upstreams) -> None:
    """Says which models are served where."""
    from kvboost.deploy.models import shown_names

    listed = {url: models for url, models in upstreams.models.items() if models is not None}
    if len({frozenset(models) for models in listed.values()}) > 1:
        for url, models in listed.items():
            say.print(f"{url} serves {shown_names(models)}")
        told = "the servers serve different models; a request goes to those that list its model"
        say.print(f"warning: {told}", style="yellow")
    elif listed:
        say.print(f"serving {shown_names(next(iter(listed.values())))}")
    for url, why in upstreams.unlisted.items():
        told = f"{url} does not list its models to the router ({why})"
        say.print(f"note: {told}; requests for any model may go there", style="yellow")
