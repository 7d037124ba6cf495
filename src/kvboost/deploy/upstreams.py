"""The servers that requests are sent to, and which of them can take one now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from kvboost.deploy.connections import Connections
from kvboost.errors import ConfigError

logger = logging.getLogger("kvboost.route")

UP, DOWN, DRAINING = "up", "down", "draining"
CHECK_SECONDS = 5.0
"""Time that a health check may take."""
MAX_CHECK = 64 * 1024
"""Bytes of an answer to a health check."""
PATIENCE = 3
"""Health checks that may time out before an upstream is taken out: a busy server answers late, and
moving its requests elsewhere would only make the others busy too."""
_PATHS = ("/ready", "/health")
"""KVBoost's ``/ready`` also says whether a server is draining; others have ``/health`` alone."""


def upstream_url(given: str) -> str:
    """``given`` as the address of a server, with or without ``/v1`` at its end. Raises ConfigError
    if it is not one."""
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
            except asyncio.TimeoutError:
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
                self._set(one, UP, "")
            elif status == 503:
                self._set(one, DRAINING, "it takes no new requests")
            else:
                self._set(one, DOWN, f"{_PATHS[one.path]} answers {status}")

    async def _status(self, one: Upstream) -> int:
        check = httpx.Request("GET", one.url + _PATHS[one.path])
        answer, _ = await self._connections.fetch(check, CHECK_SECONDS, MAX_CHECK)
        return answer.status_code

    def _set(self, one: Upstream, state: str, why: str) -> None:
        if state != one.state:
            told = f": {why}" if why else ""
            level = logging.INFO if state == UP else logging.WARNING
            logger.log(level, "upstream %s is %s%s", one.url, state, told)
        one.state, one.why = state, why


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
