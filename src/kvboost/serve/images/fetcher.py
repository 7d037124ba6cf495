"""Downloads of images that requests name by address. The operator allows the hosts; what they
answer, and where their names and redirects lead, is not trusted."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import httpx

import kvboost
from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import short, shown
from kvboost.serve.http.streaming import within
from kvboost.serve.images.addresses import (
    AddressRefused,
    ImageHosts,
    IPAddress,
    RemoteUrl,
    plain_ip,
    trusted_authorities,
)
from kvboost.serve.metrics import Metrics

T = TypeVar("T")

logger = logging.getLogger("kvboost.serve")

MAX_FETCHES = 32
"""Images that a server fetches at once. A tenant among others may have half of these places."""
MAX_REDIRECTS = 3
_CONNECT_SECONDS = 5.0
_REDIRECTS = (301, 302, 303, 307, 308)
_KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")
_BROKEN = (httpx.TransportError, ssl.SSLError)
"""A host that wants a certificate of ours says so after the handshake, in place of its answer."""
_UNREACHED = "it cannot be reached, or is not one that this server may reach"
"""Also if it was refused: a client must not learn which machines are in the server's network."""


class FetchError(Exception):
    """An image cannot be fetched."""

    def __init__(self, told: str, reason: str | None = None) -> None:
        """``told``: what the client learns. ``reason``: what the log says, by default the same."""
        super().__init__(told)
        self.told = told
        self.reason = told if reason is None else reason


class FetchedImage(NamedTuple):
    kind: str
    data: bytes

    @property
    def data_url(self) -> str:
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode()}"


class _Limits:
    """Where the images of one request may come from, and the bytes that they may have."""

    def __init__(self, hosts: ImageHosts, most: int, together: int) -> None:
        """``most`` and ``together``: the bytes of one of them, and of all."""
        self.hosts = hosts
        self._most = most
        self._together = self._left = together

    def check(self, size: int, new: int) -> None:
        """Raises FetchError if an image with ``size`` bytes is too large, or if ``new`` ones are
        too many for all images together."""
        if size > self._most:
            raise FetchError(f"it has more than {self._most:,} bytes, which one image may have")
        if new > self._left:
            raise FetchError(
                f"with it, the fetched images of the request have more than {self._together:,} "
                "bytes, which they may have together"
            )

    def take(self, new: int) -> None:
        self._left -= new


def resolve(name: str) -> list[IPAddress]:
    """The IP addresses of a name. Raises OSError if it has none. For a thread."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    given = [ipaddress.ip_address(str(address[0])) for *_, address in found]
    return list(dict.fromkeys(map(plain_ip, given)))


class _OwnLoop:
    """An event loop in a thread of its own. What strangers send there, such as an answer in pieces
    of one byte, does not hold up the loop of the server."""

    def __init__(self, name: str) -> None:
        """Raises OSError or RuntimeError if the process can have no more loops or threads."""
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop, self._over = runner.get_loop(), asyncio.Event()

        def run() -> None:
            with runner:
                runner.run(self._over.wait())

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            runner.close()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled with the caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Cancels what is running there."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


class ImageFetcher:
    """Fetches images for one server, in a thread of its own. Must be closed."""

    def __init__(
        self,
        metrics: Metrics,
        seconds: float,
        resolve: Callable[[str], Sequence[IPAddress]] = resolve,
    ) -> None:
        """``seconds``: in which all images of a request must have arrived; 0 sets no limit. Raises
        ConfigError, OSError or RuntimeError if none can be fetched."""
        self._metrics = metrics
        self._seconds = seconds
        self._resolve = resolve
        self._trusted = trusted_authorities()
        self._own_loop = _OwnLoop("kvboost-images")
        self._lookups = asyncio.Semaphore(MAX_FETCHES)
        self._places = asyncio.Semaphore(MAX_FETCHES)
        self._of_tenant: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def fetch(
        self,
        urls: Mapping[str, int],
        hosts: ImageHosts,
        *,
        most: int,
        together: int,
        tenant: str,
        request_id: str,
    ) -> dict[str, FetchedImage]:
        """The images at ``urls``, which are on ``hosts``, by their address. ``urls``: how often the
        request has each; so often its bytes count. ``most`` and ``together``: the bytes that one of
        them may have, and all of them. Raises ApiError if one cannot be fetched; the others are
        cancelled then."""
        limits = _Limits(hosts, most, together)
        return await self._own_loop.run(self._fetch(urls, limits, tenant, request_id))

    def close(self) -> None:
        """Ends all downloads."""
        self._own_loop.close()

    async def _fetch(
        self, urls: Mapping[str, int], limits: _Limits, tenant: str, request_id: str
    ) -> dict[str, FetchedImage]:
        found: dict[str, FetchedImage] = {}

        async def fetch_one(url: str, times: int) -> None:
            async with self._place(tenant):
                try:
                    found[url] = await self._follow(limits.hosts.check(url), limits, times)
                except FetchError as error:
                    raise self._failed(url, error, request_id) from None
            self._metrics.image_fetch("fetched")

        async def fetch_all() -> None:
            async with asyncio.TaskGroup() as group:
                for url, times in urls.items():
                    group.create_task(fetch_one(url, times))

        try:
            await within(self._seconds, fetch_all())
        except* ApiError as errors:
            failed = errors.exceptions[0]
        except* TimeoutError:
            late = next((url for url in urls if url not in found), next(iter(urls)))
            said = f"it did not arrive within {self._seconds:g} s"
            failed = self._failed(late, FetchError(said), request_id)
        else:
            return found
        raise failed

    @asynccontextmanager
    async def _place(self, tenant: str) -> AsyncIterator[None]:
        """One of the places for downloads."""
        if not tenant:  # there are no others
            async with self._places:
                yield
            return
        own = self._of_tenant.setdefault(tenant, asyncio.Semaphore(MAX_FETCHES // 2))
        async with own, self._places:
            yield

    def _failed(self, url: str, error: FetchError, request_id: str) -> ApiError:
        """The response. The log has the host and the reason, not the path: it may be private."""
        self._metrics.image_fetch("failed")
        host = RemoteUrl.of(url).host_header
        logger.info("%s: an image of %s was not fetched: %s", request_id, host, error.reason)
        said = f"the image at {shown(url)} was not fetched: {error.told}"
        return ApiError(400, f"{said}; send it as a data URL", "image_not_fetched")

    async def _follow(self, url: RemoteUrl, limits: _Limits, times: int) -> FetchedImage:
        for _ in range(1 + MAX_REDIRECTS):
            async with self._answer(url, limits.hosts) as answer:
                if answer.status_code not in _REDIRECTS:
                    return await _image_in(answer, limits, times)
                location = answer.headers.get("location", "")
            try:
                url = limits.hosts.check_host(url.redirected(location))
            except AddressRefused as error:
                said = f"it redirects to another address, which {error}"
                raise FetchError(said, f"{said}; it is {shown(location)}") from None
        raise FetchError(f"it redirects more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def _answer(self, url: RemoteUrl, hosts: ImageHosts) -> AsyncIterator[httpx.Response]:
        """The answer of an allowed host, whose body is not read yet. A connection is for one
        request only: the next host of the same machine has another certificate."""
        problem: Exception | None = None
        for ip in await self._addresses(url, hosts):
            # A transport has no cookies, no keys and no proxies, and follows no redirects.
            async with httpx.AsyncHTTPTransport(self._trusted, trust_env=False) as transport:
                try:
                    answer = await transport.handle_async_request(_request(url, ip))
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    problem = error
                    continue
                except _BROKEN as error:
                    raise FetchError(_UNREACHED, _reason(error)) from None
                try:
                    async with aclosing(answer):
                        yield answer
                except _BROKEN as error:
                    said = "its connection broke before all of it had arrived"
                    raise FetchError(said, f"{said}: {_reason(error)}") from None
                return
        raise FetchError(_UNREACHED, _reason(problem))

    async def _addresses(self, url: RemoteUrl, hosts: ImageHosts) -> list[IPAddress]:
        """The IP addresses to connect to. They are looked up once, and checked; a name that means
        another machine a moment later does not matter."""
        if url.ip is not None:
            found: Sequence[IPAddress] = [url.ip]
        else:
            try:
                found = await self._look_up(url.host)
            except (OSError, UnicodeError) as error:
                reason = f"{url.host} has no IP address: {error}"
                raise FetchError(_UNREACHED, reason) from None
        allowed = [ip for ip in found if hosts.may_connect(url, ip)]
        if not allowed:
            told = ", ".join(map(str, found))
            reason = f"{url.host} is {told}, which is not public; --image-host would allow it"
            raise FetchError(_UNREACHED, reason)
        return allowed

    async def _look_up(self, name: str) -> Sequence[IPAddress]:
        """The IP addresses of a name. Its thread may be stuck while no name server answers, and the
        end of the process does not wait for it."""
        await self._lookups.acquire()
        loop, found = asyncio.get_running_loop(), Future[Sequence[IPAddress]]()
        found.set_running_or_notify_cancel()  # from here on it cannot be cancelled

        def work() -> None:
            try:
                found.set_result(self._resolve(name))
            except Exception as error:
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._lookups.release)

        try:
            threading.Thread(target=work, name="kvboost-resolver", daemon=True).start()
        except RuntimeError as error:
            self._lookups.release()
            raise OSError("no thread could look it up") from error
        return await asyncio.wrap_future(found)


def _request(url: RemoteUrl, ip: IPAddress) -> httpx.Request:
    headers = {
        "host": url.host_header,
        "accept": ", ".join(_KINDS),
        "accept-encoding": "identity",
        "user-agent": f"kvboost/{kvboost.__version__}",
        "connection": "close",
    }
    known = {"timeout": {"connect": _CONNECT_SECONDS}, "sni_hostname": url.host}
    return httpx.Request("GET", url.at(str(ip)), headers=headers, extensions=known)


async def _image_in(answer: httpx.Response, limits: _Limits, times: int) -> FetchedImage:
    """The image in an answer, which need not be one: its file is checked like that of a data URL
    when it is opened."""
    if answer.status_code != 200:
        raise FetchError(f"it was answered with the status {answer.status_code}")
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _KINDS:
        raise FetchError(
            f"its content-type is {shown(kind)}, and must be one of {', '.join(_KINDS)}"
        )
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":  # a few bytes could become any number
        raise FetchError(f"it is compressed as {shown(coding)}, which was not asked for")
    declared = answer.headers.get("content-length", "")
    if declared.isdigit():
        size = int(declared[:18])
        limits.check(size, size * times)
    data = bytearray()
    async for piece in answer.aiter_raw():
        limits.check(len(data) + len(piece), len(piece) * times)
        limits.take(len(piece) * times)
        data += piece
    return FetchedImage(kind, bytes(data))


def _reason(error: Exception | None) -> str:
    """The text of an error of httpx for the log; some have no message."""
    return short(f"{type(error).__name__}: {error}", 200)
