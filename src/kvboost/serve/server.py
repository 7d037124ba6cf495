"""The state that all routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

import kvboost
from kvboost.errors import ConfigError
from kvboost.serve.auth import Keys, Tenant
from kvboost.serve.documents import Documents
from kvboost.serve.embedder import Embedder
from kvboost.serve.errors import ApiError
from kvboost.serve.explanations import Explanations
from kvboost.serve.http.workers import Workers
from kvboost.serve.kept_kv import KeptKV
from kvboost.serve.live import LiveLog
from kvboost.serve.metrics import Metrics
from kvboost.serve.openai_responses.store import StoredResponses
from kvboost.serve.sessions import Sessions
from kvboost.serve.settings import RELOADABLE, ServerSettings

if TYPE_CHECKING:
    from kvboost.serve.images.addresses import ImageHosts
    from kvboost.serve.images.fetcher import ImageFetcher
    from kvboost.serve.tracing import Tracing


class ServerState:
    """One engine on the network."""

    def __init__(self, engine: kvboost.KVBoost, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = Keys(settings)
        self.metrics = Metrics(engine)
        self.live = LiveLog()
        self.explanations = Explanations()
        self.facts = engine.facts()
        self.workers = Workers()
        self.documents = Documents(engine, settings, self.keys)
        self.sessions = Sessions(engine, settings)
        self.embedder = Embedder(engine, settings.embedding_model)
        self.stored_responses = StoredResponses(settings)
        self.kept_kv = KeptKV(engine)
        self.image_hosts: ImageHosts | None = None
        """The hosts that images may be fetched from, if there are any."""
        self.images: ImageFetcher | None = None
        self.waiting_connections: dict[asyncio.Protocol, None] = {}
        """Connections without a request, the one that has waited longest first."""
        self.started = time.time()
        self.draining = False
        own = settings.embedding_model
        self.names = self._names_in(settings)
        self._own_embedding_names = () if own is None else (_plain_name(own.name),)
        self.tracing: Tracing | None = None
        if settings.otlp_endpoint is not None:
            from kvboost.serve.tracing import start_tracing

            self.tracing = start_tracing(settings.otlp_endpoint, self.names[0])

    def reload(self, settings: ServerSettings) -> list[str]:
        """Takes over the settings that a running server can change; returns the names of those that
        changed. Requests that have begun keep their tenant. What a removed key has left here
        (responses, documents, sessions, explanations) is dropped. Raises ConfigError, and changes
        nothing, if ``settings`` would add the first key or remove the last one, or name the model
        as an adapter is named, or if images cannot be fetched."""
        if settings.needs_key != self.settings.needs_key:
            raise ConfigError("whether requests need an API key cannot change without a restart")
        new = {name: getattr(settings, name) for name in RELOADABLE}
        changed = [name for name in RELOADABLE if new[name] != getattr(self.settings, name)]
        settings = replace(self.settings, **new)
        names = self._names_in(settings)
        fetching = self._fetching(settings)
        # Nothing fails from here on.
        self.settings, self.names = settings, names
        self.image_hosts, self.images = fetching
        self.keys.load(settings)
        owners = {tenant.owner for tenant in self.keys.tenants()}
        for response_id in self.stored_responses.keep_only(owners):
            self.kept_kv.release(response_id)
        self.documents.keep_only(owners)
        self.sessions.keep_only(owners)
        self.explanations.keep_only(owners)
        return changed

    def start_images(self) -> None:
        """Starts what fetches images, if there are hosts that they may be fetched from."""
        self.image_hosts, self.images = self._fetching(self.settings)

    def _fetching(self, settings: ServerSettings) -> tuple[ImageHosts | None, ImageFetcher | None]:
        """The hosts that images may be fetched from, and what fetches them, if it is needed or has
        been. Raises ConfigError if it cannot be started."""
        if not settings.image_hosts:
            return None, self.images
        # Not above: most servers fetch nothing, and httpx takes a third of a second to import.
        from kvboost.serve.images.addresses import ImageHosts
        from kvboost.serve.images.fetcher import ImageFetcher

        hosts = ImageHosts(settings.image_hosts)
        try:
            return hosts, self.images or ImageFetcher(self.metrics, settings.image_seconds)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"images cannot be fetched: {error}") from None

    async def stop_images(self) -> None:
        """Fetches nothing any more."""
        images, self.images, self.image_hosts = self.images, None, None
        if images is not None:
            await asyncio.to_thread(images.close)

    def _names_in(self, settings: ServerSettings) -> tuple[str, ...]:
        """The names of the model. Raises ConfigError if an adapter has one of them."""
        names = served_names(self.engine, settings)
        if hidden := sorted({*names} & {*self.engine.adapters()}):
            said = f"{hidden[0]!r} names both the model and an adapter; rename one of them"
            raise ConfigError(said)
        return names

    @property
    def embedding_names(self) -> tuple[str, ...]:
        """The names of the model that makes embeddings."""
        return self._own_embedding_names or self.names

    @property
    def adapter_names(self) -> list[str]:
        """The names of adapters, which requests may use as well."""
        return [name for name in self.engine.adapters() if name not in self.names]

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request for the model ``name`` means."""
        return name if name in self.adapter_names else None

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 if neither the model nor an adapter is served under ``name``."""
        _check_name(name, (*self.names, *self.adapter_names))

    def check_embedding_model(self, name: str) -> None:
        """The same for the model that makes embeddings."""
        _check_name(name, self.embedding_names)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError 400 if the model has no such token."""
        if ids and max(ids) >= self.engine.vocab_size:
            said = f"{param} has token id {max(ids):,}; the model has {self.engine.vocab_size:,}"
            raise ApiError(400, said, "invalid_value", param)

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


def _check_name(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        said = f"there is no model {name[:80]!r} here; there is {', '.join(names)}"
        raise ApiError(404, said, "model_not_found", "model")


def served_names(engine: kvboost.KVBoost, settings: ServerSettings) -> tuple[str, ...]:
    """The names that requests may use for the model. Our own answers use the first."""
    return settings.served_names or (_plain_name(engine.model_name),)


def _plain_name(name: str) -> str:
    """The last part of a path: clients need not know where a model is stored."""
    is_path = name.startswith((".", "/", "~")) or "\\" in name or Path(name).exists()
    return Path(name).name.removesuffix(".gguf") or "model" if is_path else name
