"""The state that all routes share."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost.errors import ConfigError
from kvboost.serve.auth import Keys, Tenant
from kvboost.serve.errors import ApiError
from kvboost.serve.live import LiveLog
from kvboost.serve.metrics import Metrics
from kvboost.serve.settings import RELOADABLE, ServerSettings
from kvboost.serve.workers import Workers

if TYPE_CHECKING:
    from kvboost import KVBoost
    from kvboost.serve.tracing import Tracing


class ServerState:
    """One engine on the network."""

    def __init__(self, engine: KVBoost, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = Keys(settings)
        self.metrics = Metrics(engine)
        self.live = LiveLog()
        self.workers = Workers()
        self.waiting_connections: dict[H11Protocol, None] = {}
        """Connections without a request, the one that has waited longest first."""
        self.started = time.time()
        self.draining = False
        self.names = served_names(engine, settings)
        self.tracing: Tracing | None = None
        if settings.otlp_endpoint is not None:
            from kvboost.serve.tracing import start_tracing

            self.tracing = start_tracing(settings.otlp_endpoint, self.names[0])

    def reload(self, settings: ServerSettings) -> list[str]:
        """Takes over the settings that a running server can change; returns the names of those that
        changed. Requests that have begun keep their tenant. Raises ConfigError, and changes
        nothing, if ``settings`` would add the first key or remove the last one."""
        if settings.needs_key != self.settings.needs_key:
            raise ConfigError("whether requests need an API key cannot change without a restart")
        new = {name: getattr(settings, name) for name in RELOADABLE}
        changed = [name for name in RELOADABLE if new[name] != getattr(self.settings, name)]
        self.settings = replace(self.settings, **new)
        self.keys.load(self.settings)
        self.names = served_names(self.engine, self.settings)
        return changed

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 if the model is not served under ``name``."""
        if name not in self.names:
            raise ApiError(
                404,
                f"there is no model {name[:80]!r} here; there is {', '.join(self.names)}",
                code="model_not_found",
                param="model",
            )

    def strategy(self, chosen: str | None) -> str:
        return chosen or self.engine.config.recompute_strategy


async def _server(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _caller(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


Server = Annotated[ServerState, Depends(_server)]
"""A parameter of routes: the server's state."""
Caller = Annotated[Tenant, Depends(_caller)]
"""A parameter of routes: the tenant that the request's key belongs to."""


def served_names(engine: KVBoost, settings: ServerSettings) -> tuple[str, ...]:
    """The names that requests may use for the model. Our own answers use the first."""
    return settings.served_names or (_plain_name(engine.model_name),)


def _plain_name(name: str) -> str:
    """The last part of a path: clients need not know where a model is stored."""
    is_path = name.startswith((".", "/", "~")) or "\\" in name or Path(name).exists()
    return Path(name).name.removesuffix(".gguf") or "model" if is_path else name
