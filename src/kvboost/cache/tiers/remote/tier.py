"""Chunks that machines share: in a Redis or Valkey server, in an object store, in a folder.

Whatever happens there changes speed and nothing else. A chunk that comes back is checked from
its first byte to its last; an error is counted and is a miss; and where errors follow one
another, nobody waits for the next: a breaker keeps requests away until a trial succeeds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.errors import ConfigError
from kvboost.tokens.hashing import ChunkKey

CONNECT_TIMEOUT = 0.25
SOCKET_TIMEOUT = 1.0
"""Seconds. Longer than a healthy server on the same network needs, by far."""

Fault = Literal["timeout", "unreachable", "full", "corrupt", "error"]
State = Literal["closed", "open", "half-open"]

_HARMLESS: frozenset[Fault] = frozenset(("full", "corrupt"))  # it answered
_HEADERS_AT_ONCE = 64
_REDIS_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
}

Answer = TypeVar("Answer")


class Backend(Protocol):
    """Keeps values by key, far away, within a budget. Safe to call from several threads. What
    fails raises anything at all; ``fault`` says what it was."""

    @property
    def max_bytes(self) -> int: ...

    def fault(self, error: Exception) -> Fault: ...

    def get(self, key: ChunkKey) -> bytes | None:
        """The value as it came, checked by nobody; None if there is none."""

    def put(self, key: ChunkKey, value: bytes) -> bool:
        """Keeps ``value``, a whole chunk as ``codec.encode`` writes it, and lets older ones go
        first where the budget asks for it. False if it does not fit or somebody else was
        quicker; a value is there whole or not at all. True if there is one already."""

    def delete(self, key: ChunkKey) -> None: ...

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """In one round trip."""

    def keys(self) -> list[ChunkKey]: ...

    def headers(self, keys: Sequence[ChunkKey]) -> list[bytes | None]:
        """The beginnings of these values, long enough for ``codec.read_header``."""

    def nbytes(self) -> int: ...

    def close(self) -> None: ...


class Ticket(NamedTuple):
    """Leave to make one call, in the breaker's state of then."""

    epoch: int


class Breaker:
    """Closed: calls pass. After ``num_failures`` in a row open: none does, for ``first_pause``
    seconds. Then half-open: one does, as a trial. Success closes it, failure opens it for twice
    as long, up to ``longest_pause``. Calls that were on their way when the state changed say
    nothing about the new one."""

    def __init__(
        self,
        *,
        num_failures: int = 3,
        first_pause: float = 1.0,
        longest_pause: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_failures = num_failures
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = first_pause
        self._open_until: float | None = None  # None: closed
        self._on_trial = False
        self._epoch = 0

    @property
    def state(self) -> State:
        with self._lock:
            if self._open_until is None:
                return "closed"
            return "half-open" if self._on_trial or self._clock() >= self._open_until else "open"

    def enter(self) -> Ticket | None:
        """Leave to make a call, to be handed to :meth:`leave` however it ends; or None."""
        with self._lock:
            if self._open_until is not None:
                if self._on_trial or self._clock() < self._open_until:
                    return None
                self._on_trial = True
                self._epoch += 1
            return Ticket(self._epoch)

    def leave(self, ticket: Ticket, succeeded: bool) -> None:
        with self._lock:
            if ticket.epoch != self._epoch:
                return
            if succeeded:
                self._failures = 0
                self._pause = self._first_pause
                if self._on_trial:
                    self._change(None)
            elif self._on_trial:
                self._pause = min(2 * self._pause, self._longest_pause)
                self._change(self._clock() + self._pause)
            else:
                self._failures += 1
                if self._failures >= self._num_failures:
                    self._change(self._clock() + self._pause)

    def _change(self, open_until: float | None) -> None:
        self._open_until = open_until
        self._on_trial = False
        self._failures = 0
        self._epoch += 1


class RemoteTier:
    """Safe to call from several threads. Everything asks the breaker first."""

    name = "remote"

    def __init__(self, backend: Backend, breaker: Breaker | None = None) -> None:
        self._backend = backend
        self._breaker = breaker or Breaker()
        self._lock = threading.Lock()  # guards the counters
        self._faults: dict[str, int] = {}
        self._hits = self._misses = self._puts = 0
        self._closed = False

    @property
    def max_bytes(self) -> int:
        return self._backend.max_bytes

    @property
    def nbytes(self) -> int:
        """Asks; 0 if nobody answers."""
        return self._ask(self._backend.nbytes, 0)

    @property
    def faults(self) -> dict[str, int]:
        with self._lock:
            return dict(self._faults)

    @property
    def state(self) -> State:
        """Of the breaker."""
        return self._breaker.state

    def stats(self) -> dict[str, Any]:
        held = self.nbytes
        with self._lock:
            return {
                "state": self._breaker.state,
                "hits": self._hits,
                "misses": self._misses,
                "puts": self._puts,
                "faults": dict(self._faults),
                "bytes": held,
            }

    def get(self, key: ChunkKey) -> KVChunk | None:
        value = self._ask(lambda: self._backend.get(key), None)
        chunk = None if value is None else self._decode(key, value)
        with self._lock:
            if chunk is None:
                self._misses += 1
            else:
                self._hits += 1
        return chunk

    def put(self, chunk: KVChunk) -> bool:
        kept = self._ask(lambda: self._put(chunk), False)
        if kept:
            with self._lock:
                self._puts += 1
        return kept

    def delete(self, key: ChunkKey) -> None:
        self._ask(lambda: self._backend.delete(key), None)

    def contains(self, key: ChunkKey) -> bool:
        return self.contains_many([key])[0]

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` are here, in one round trip."""
        if not keys:
            return []
        return self._ask(lambda: self._backend.contains_many(keys), [False] * len(keys))

    def keys(self) -> list[ChunkKey]:
        return self._ask(self._backend.keys, [])

    def infos(self) -> Iterator[ChunkInfo]:
        """What is here, a few headers at a time. What cannot be read is left out."""
        keys = self.keys()
        for start in range(0, len(keys), _HEADERS_AT_ONCE):
            some = keys[start : start + _HEADERS_AT_ONCE]
            for key, header in zip(some, self._headers(some), strict=True):
                info = None if header is None else self._read_header(key, header)
                if info is not None:
                    yield info

    def close(self) -> None:
        """Lets go of connections; every later call is a miss."""
        self._closed = True
        self._backend.close()

    def _ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The answer; ``otherwise`` if there is none or the breaker is open."""
        ticket = None if self._closed else self._breaker.enter()
        if ticket is None:
            return otherwise
        answered = False
        try:
            answer = question()
            answered = True
            return answer
        except Exception as error:
            fault = self._backend.fault(error)
            self._count(fault)
            answered = fault in _HARMLESS
            return otherwise
        finally:
            self._breaker.leave(ticket, answered)

    def _put(self, chunk: KVChunk) -> bool:
        # To ask costs less than to encode what is there already.
        if self._backend.contains_many([chunk.key])[0]:
            return True
        return self._backend.put(chunk.key, codec.encode(chunk))

    def _decode(self, key: ChunkKey, value: bytes) -> KVChunk | None:
        """The chunk, or None: then these bytes are gone from there too."""
        try:
            chunk = codec.decode(value)
            if chunk.key == key:
                return chunk
        except Exception:  # noqa: S110 - others write there too: no bytes may stop a request
            pass
        self._count("corrupt")
        self.delete(key)
        return None

    def _headers(self, keys: Sequence[ChunkKey]) -> Sequence[bytes | None]:
        return self._ask(lambda: self._backend.headers(keys), [None] * len(keys))

    def _read_header(self, key: ChunkKey, header: bytes) -> ChunkInfo | None:
        try:
            info = codec.info(codec.read_header(header))
        except codec.BadChunk:
            info = None
        if info is not None and info.key == key:
            return info
        self._count("corrupt")
        return None

    def _count(self, fault: Fault) -> None:
        with self._lock:
            self._faults[fault] = self._faults.get(fault, 0) + 1


def open_remote(
    url: str,
    max_bytes: int | None,
    *,
    connect_timeout: float = CONNECT_TIMEOUT,
    socket_timeout: float = SOCKET_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> RemoteTier:
    """The tier behind ``url``: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://`` or
    ``unix://`` for a server, anything fsspec knows, or a path. Connects nowhere yet.

    ``max_bytes`` may be None for a server, which then has its own limit only.
    ``storage_options`` go to fsspec's filesystem. Raises ``ConfigError``.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme in _REDIS_SCHEMES:
        if storage_options:
            raise ConfigError(
                f"storage options {sorted(storage_options)} are for fsspec's filesystems; "
                f"{_shown(url)!r} takes its options in the URL, as in redis://host:6379/0?name=value"
            )
        backend = _redis(
            f"{_REDIS_SCHEMES[scheme]}://{rest}",
            sys.maxsize if max_bytes is None else max_bytes,
            connect_timeout,
            socket_timeout,
        )
    elif max_bytes is None:
        raise ConfigError(
            f"the remote store {_shown(url)!r} needs a budget in bytes; only a Redis or Valkey "
            "server may do without, because it has a limit of its own"
        )
    else:
        backend = _fsspec(url, max_bytes, socket_timeout, storage_options or {})
    return RemoteTier(backend)


def _redis(url: str, max_bytes: int, connect_timeout: float, socket_timeout: float) -> Backend:
    try:
        from kvboost.cache.tiers.remote.redis import RedisBackend
    except ModuleNotFoundError as error:
        raise _missing(url, error) from None
    try:
        return RedisBackend(
            url, max_bytes, connect_timeout=connect_timeout, socket_timeout=socket_timeout
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the URL {_shown(url)!r} cannot be used: {error}; it should look like "
            "redis://[user:password@]host[:port][/db] or unix:///path/to/socket"
        ) from None


def _fsspec(
    url: str, max_bytes: int, socket_timeout: float, storage_options: Mapping[str, Any]
) -> Backend:
    try:
        from kvboost.cache.tiers.remote.fsspec import FsspecBackend
    except ModuleNotFoundError as error:
        raise _missing(url, error) from None
    try:
        return FsspecBackend(url, max_bytes, timeout=socket_timeout, options=storage_options)
    except ImportError as error:
        raise ConfigError(
            f"the remote store {_shown(url)!r} needs one more package: {error}"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the remote store {_shown(url)!r} cannot be used: {error}; allowed are "
            f"{', '.join(f'{scheme}://' for scheme in _REDIS_SCHEMES)}, a path, and what fsspec "
            "knows, such as s3://, gs:// and file:// (pip install 'kvboost[remote]')"
        ) from None


def _missing(url: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"the remote store {_shown(url)!r} needs the package {error.name!r}: "
        "pip install 'kvboost[remote]'"
    )


def _shown(url: str) -> str:
    """``url`` without what should not be read in a log."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://…"
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user:
        user = user.partition(":")[0] + ":…"
    query = "…" if "password" in parts.query else parts.query
    return parts._replace(netloc=user + at + host, query=query).geturl()
