"""The settings of a router, and what all of its requests share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvboost.config import at_least
from kvboost.deploy.connections import Connections
from kvboost.deploy.metrics import RouteMetrics
from kvboost.deploy.router import Router, RouterSettings
from kvboost.deploy.upstreams import Upstreams, upstream_url
from kvboost.errors import ConfigError
from kvboost.serve.http.workers import Workers
from kvboost.serve.settings import ServerSettings


@dataclass(frozen=True)
class ProxySettings:
    """The settings of one router. Validated on creation."""

    upstreams: tuple[str, ...]
    """The servers, as ``http://host:port``."""
    router: RouterSettings = field(default_factory=RouterSettings)
    shared_cache: bool = False
    """Whether the upstreams share cached text between API keys."""
    health_seconds: float = 2.0
    """Seconds between two checks of an upstream."""
    timeout: float | None = 600.0
    """Seconds for which an upstream may send nothing."""
    limits: ServerSettings = field(default_factory=ServerSettings)
    """The limits that clients meet: bodies, headers, connections; and the time to drain."""

    def __post_init__(self) -> None:
        if not self.upstreams:
            raise ConfigError("no upstream is given; name the servers, such as http://host:8000")
        object.__setattr__(self, "upstreams", tuple(map(upstream_url, self.upstreams)))
        at_least(self.health_seconds, 0.05, "health_seconds")
        if self.timeout is not None:
            at_least(self.timeout, 0.0, "timeout")


class RouteState:
    """The state that all requests share."""

    def __init__(self, settings: ProxySettings) -> None:
        self.options = settings
        self.settings = settings.limits
        self.router = Router(settings.upstreams, settings.router)
        self.connections = Connections(settings.timeout)
        self.upstreams = Upstreams(
            settings.upstreams, self.connections, settings.health_seconds, self.router.forget
        )
        self.metrics = RouteMetrics(self.router, lambda: self.upstreams.states)
        self.workers = Workers()
        self.waiting_connections: dict[asyncio.Protocol, None] = {}
        self.draining = False
