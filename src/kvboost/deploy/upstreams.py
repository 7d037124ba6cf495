"""The servers that requests are sent to: which of them can take one now, and for which models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from urllib.parse import urlsplit

import httpx

from kvboost.deploy import models
from kvboost.deploy.connections import Connections
from kvboost.errors import ConfigError

logger = logging.getLogger("kvboost.route")

UP, DOWN, DRAINING = "up", "down", "draining"
CHECK_SECONDS = 5.0
"""Time that a health check, or a list of models, may take."""
MAX_CHECK = 64 * 1024
"""Bytes that are read of an answer to a health check. Its status is all that counts."""
MODELS_SECONDS = 10.0
"""Health checks ask for the list of models again after this time; servers log these requests."""
UNKNOWN_SECONDS = 1.0
"""All upstreams are asked for their models once in this time, at most, because a request names one
that none of them has listed."""
PATIENCE = 3
"""Health checks that may time out before an upstream is taken out: a busy server answers late, and
moving its requests elsewhere would only make the others busy too."""
_PATHS = ("/ready", "/health")
"""KVBoost's ``/ready`` also says whether a server is draining; others have ``/health`` alone."""


def upstream_url(given: str) -> str:
    """``given``, without ``/v1``, as the address of a server. Raises ConfigError if it is none."""
    url = given.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(
            f"upstream {given!r} is not the address of a server; write it like "
            "http://127.0.0.1:8001, without a user, a query or a fragment"
        )
    return url


@dataclass
class Upstream:
    url: str
    state: str = DOWN
    why: str = "not checked yet"
    path: int = 0
    """Which of ``_PATHS`` it answers."""
    late: int = 0
    """Health checks that timed out, one after the other."""
    models: models.Models | None = None
    """The models that it lists; None if it does not list them to us."""
    unlisted: str = "not asked yet"
    """Why it does not."""
    asked: float = -inf
    """When it was asked for them."""


class Upstreams:
    """Checks upstreams again and again. ``on_lost`` is told of one that has lost its memory."""

    def __init__(
        self,
        urls: Sequence[str],
        connections: Connections,
        seconds: float,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._all = {url: Upstream(url) for url in urls}
        self._connections = connections
        self._seconds = seconds
        self._on_lost = on_lost
        self._wake = asyncio.Event()
        self._asking = asyncio.Lock()
        self._asked = -inf

    @property
    def usable(self) -> list[str]:
        return [one.url for one in self._all.values() if one.state == UP]

    @property
    def states(self) -> dict[str, str]:
        return {one.url: one.state for one in self._all.values()}

    @property
    def missing(self) -> dict[str, str]:
        """Why some take no requests."""
        return {one.url: one.why for one in self._all.values() if one.state != UP}

    @property
    def models(self) -> dict[str, models.Models | None]:
        """The list of each; None if it does not list its models to us."""
        return {one.url: one.models for one in self._all.values()}

    @property
    def unlisted(self) -> dict[str, str]:
        """Why some that are up do not list their models."""
        silent = (one for one in self._all.values() if one.state == UP and one.models is None)
        return {one.url: one.unlisted for one in silent}

    def serving(self, model: str) -> list[str]:
        """Those that have ``model``, whether they are up or not. One that does not list its models
        may have any; an empty ``model`` is any, too. Ollama's clients add a tag to the name."""
        names = {model, model.removesuffix(":latest")}
        return [
            one.url
            for one in self._all.values()
            if not model or one.models is None or names & one.models.keys()
        ]

    async def ask_models(self) -> None:
        """Asks those that are up for their models again, unless that was done just now."""
        async with self._asking:
            now = time.monotonic()
            if now - self._asked >= UNKNOWN_SECONDS:
                self._asked = now
                up = (one for one in self._all.values() if one.state == UP)
                await asyncio.gather(*map(self._ask_models, up))

    def failed(self, url: str, error: Exception) -> None:
        """A request could not be sent to ``url`` or got no answer. It gets no others until a check
        succeeds, which is made at once."""
        one = self._all[url]
        self._set(one, DOWN, _named(error))
        if isinstance(error, httpx.ConnectError):
            self._on_lost(url)
        self._wake.set()

    def refused(self, url: str) -> None:
        """``url`` answers that it takes no requests: looks whether it is draining."""
        self._wake.set()

    async def watch(self) -> None:
        """Checks for ever."""
        while True:
            await self.check()
            try:
                await asyncio.wait_for(self._wake.wait(), self._seconds)
            except TimeoutError:
                continue
            self._wake.clear()
            await asyncio.sleep(min(0.1, self._seconds))  # many requests may fail at once

    async def check(self) -> None:
        """Asks all of them once."""
        await asyncio.gather(*(self._check(one) for one in self._all.values()))

    async def _check(self, one: Upstream) -> None:
        try:
            status = await self._status(one)
            if status in (404, 405) and one.path + 1 < len(_PATHS):
                one.path += 1
                status = await self._status(one)
        except httpx.TimeoutException as error:
            one.late += 1
            if one.late >= PATIENCE:
                self._set(one, DOWN, _named(error))
        except httpx.TransportError as error:
            if isinstance(error, httpx.ConnectError):
                self._on_lost(one.url)
            self._set(one, DOWN, _named(error))
        else:
            one.late = 0
            if status < 400:
                if one.state != UP or time.monotonic() - one.asked >= MODELS_SECONDS:
                    await self._ask_models(one)
                self._set(one, UP, "")
            elif status == 503:
                self._set(one, DRAINING, "it takes no new requests")
            else:
                self._set(one, DOWN, f"{_PATHS[one.path]} answers {status}")

    async def _status(self, one: Upstream) -> int:
        check = httpx.Request("GET", one.url + _PATHS[one.path])
        answer, _ = await self._connections.fetch(check, CHECK_SECONDS, MAX_CHECK)
        return answer.status_code

    async def _ask_models(self, one: Upstream) -> None:
        """Asks for the list of models, without a key. If no answer comes, the last one counts."""
        one.asked = time.monotonic()
        question = httpx.Request("GET", one.url + models.PATH)
        try:
            answer, body = await self._connections.fetch(question, CHECK_SECONDS, models.MAX_LIST)
        except httpx.TransportError as error:
            one.unlisted = _named(error)
            return
        if body is None:
            one.models = None
            one.unlisted = f"{models.PATH} has more than {models.MAX_LIST:,} bytes"
        elif answer.status_code < 500:
            one.models = models.listed(body) if answer.status_code == 200 else None
            one.unlisted = f"{models.PATH} answers {answer.status_code}"

    def _set(self, one: Upstream, state: str, why: str) -> None:
        if state != one.state:
            told = f": {why}" if why else ""
            level = logging.INFO if state == UP else logging.WARNING
            logger.log(level, "upstream %s is %s%s", one.url, state, told)
        one.state, one.why = state, why


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
