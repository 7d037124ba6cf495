"""Chunks that several machines share: in a Redis or Valkey server, an object store or a folder.

A fault there changes speed and nothing else. A chunk that comes back is checked from its first
byte to its last. An error counts as a miss. After several errors in a row a breaker stops all calls
until a trial succeeds, so no request waits for a store that is down.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage
from kvboost.cache.secret import Secret
from kvboost.cache.tiers.remote.backend import Backend, Fault
from kvboost.cache.tiers.remote.breaker import Breaker, State
from kvboost.cache.tiers.stats import RemoteStats
from kvboost.config import install_extra
from kvboost.errors import ConfigError
from kvboost.tokens.hashing import ChunkKey, TokenIds
from kvboost.tokens.marks import marks

CONNECT_TIMEOUT = 0.25
SOCKET_TIMEOUT = 1.0
"""Seconds. Far more than a healthy server on the same network needs."""

log = logging.getLogger("kvboost")

_HARMLESS: frozenset[Fault] = frozenset(("full", "corrupt"))  # it answered
_HEADERS_AT_ONCE = 64
_MOST_ASKED = 1024
_MOST_MARKS = 511  # of a chunk's text
_MARK_DIGITS = 16
_REDIS_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
}

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Listing:
    """The chunks in a remote store."""

    infos: tuple[ChunkInfo, ...] = ()
    unread: int = 0
    """Chunks that nobody here can search: another version of KVBoost wrote them, or they are
    damaged."""
    is_complete: bool = True
    """Whether the store has answered every question."""

    @property
    def problem(self) -> str:
        """Why a text may be in the store though none of ``infos`` holds it; empty if it cannot."""
        if not self.is_complete:
            return "the remote store does not answer; ask again when it does"
        if self.unread:
            return (
                f"{self.unread} in remote cannot be searched, because another version of KVBoost "
                "wrote them or they are damaged; let that version forget the text, or empty the "
                "store"
            )
        return ""


class RemoteTier:
    """Safe to call from several threads. Every call asks the breaker first. With a ``secret``,
    chunks are signed, and a value that is not signed with it counts as damaged."""

    name = "remote"

    def __init__(
        self, backend: Backend, breaker: Breaker | None = None, *, secret: Secret | None = None
    ) -> None:
        self.backend = backend
        self._breaker = breaker or Breaker()
        self._secret = secret
        self._refused: set[ChunkKey] = set()  # bad values that could not be deleted
        self._lock = threading.Lock()  # guards the counters
        self._faults: dict[str, int] = {}
        self._hits = self._misses = self._puts = self._searches = self._found = 0
        self._closed = False

    @property
    def max_bytes(self) -> int:
        return self.backend.max_bytes

    @property
    def nbytes(self) -> int:
        """Asks the store; 0 if it does not answer."""
        return self._ask(self.backend.nbytes, 0)

    @property
    def faults(self) -> dict[str, int]:
        with self._lock:
            return dict(self._faults)

    @property
    def state(self) -> State:
        """The breaker's state."""
        return self._breaker.state

    def stats(self) -> RemoteStats:
        nbytes = self.nbytes
        with self._lock:
            return RemoteStats(
                state=self._breaker.state,
                hits=self._hits,
                misses=self._misses,
                puts=self._puts,
                searches=self._searches,
                found=self._found,
                faults=dict(self._faults),
                nbytes=nbytes,
            )

    def get(self, key: ChunkKey, expected: codec.Expected | None = None) -> KVChunk | None:
        """The chunk, if it is whole and what was ``expected``. Otherwise it is deleted there,
        unless another version of KVBoost wrote it. A larger value is not even received."""
        most = None if expected is None else expected.most_bytes
        value = None
        if key not in self._refused:
            value = self._ask(lambda: self.backend.get(key, most), None)
        chunk = None if value is None else self._decode(key, value, expected)
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
        self._ask(lambda: self.backend.delete(key), None)

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` are there, in one round trip. Values that were refused do not count."""
        if not keys:
            return []
        found = self._ask(lambda: self.backend.contains_many(keys), [False] * len(keys))
        return [has and key not in self._refused for key, has in zip(keys, found, strict=True)]

    def count(self, keys: Sequence[ChunkKey]) -> int | None:
        """The number of ``keys`` that are there, refused values included; None if the store does
        not answer."""
        found = self._ask(lambda: self.backend.contains_many(keys), None) if keys else []
        return None if found is None else sum(found)

    def keys(self) -> list[ChunkKey]:
        return self._ask(self.backend.keys, [])

    def list_chunks(self) -> Listing:
        """The chunks that are there; reads all headers, a few at a time."""
        keys = self._ask(self.backend.keys, None)
        if keys is None:
            return Listing(is_complete=False)
        infos: list[ChunkInfo] = []
        unread: list[ChunkKey] = []
        is_complete = True
        for start in range(0, len(keys), _HEADERS_AT_ONCE):
            some = keys[start : start + _HEADERS_AT_ONCE]
            headers = self._ask(partial(self.backend.headers, some), None)
            if headers is None:
                is_complete = False
                continue
            for key, header in zip(some, headers, strict=True):
                info = None if header is None else self._read_header(key, header)
                if info is None:
                    unread.append(key)
                else:
                    infos.append(info)
        still_there = self.count(unread)  # others may have removed some meanwhile
        return Listing(tuple(infos), still_there or 0, is_complete and still_there is not None)

    @property
    def has_index(self) -> bool:
        """Whether chunks can be found by their text."""
        return self.backend.has_index

    def find(self, root: ChunkKey, texts: Sequence[TokenIds]) -> list[ChunkInfo]:
        """Chunks of ``root`` that have a mark in common with one of ``texts``, in one round trip.
        Their headers are checked, their data are not. Of very long texts some marks are left out,
        evenly."""
        if self.state == "open":  # no need to compute marks
            return []
        names = list(dict.fromkeys(name for ids in texts for name in self._marks(root, ids)))
        if not names:
            return []
        with self._lock:
            self._searches += 1
        return self._find(root, _spread(names, _MOST_ASKED), ())

    def find_around(
        self, root: ChunkKey, before: Sequence[ChunkKey], after: Sequence[ChunkKey]
    ) -> list[ChunkInfo]:
        """The chunks ``before``, and some that follow those in ``after``."""
        if not before and not after:
            return []
        return self._find(root, [_mark_after(key) for key in after], before)

    def close(self) -> None:
        """Closes connections; every later call is a miss."""
        self._closed = True
        self.backend.close()

    def _ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The answer; ``otherwise`` if there is none or the breaker is open."""
        entered = None if self._closed else self._breaker.enter()
        if entered is None:
            return otherwise
        answered = False
        try:
            answer = question()
            answered = True
            return answer
        except Exception as error:
            fault = self.backend.fault(error)
            self._count(fault)
            answered = fault in _HARMLESS
            return otherwise
        finally:
            self._breaker.leave(entered, answered)

    def _put(self, chunk: KVChunk) -> bool:
        # Asking costs less than encoding a chunk that is already there.
        if self.backend.contains_many([chunk.key])[0]:
            return True
        value, info = codec.encode(chunk, self._secret), chunk.info
        if not self.has_index:
            return self.backend.put(chunk.key, value)
        names = list(dict.fromkeys(self._marks(info.root, info.token_ids)))
        names = _spread(names, _MOST_MARKS)
        if info.parent == info.before != info.root:
            names.append(_mark_after(info.parent))
        # What was computed on moved text serves where there is nothing better.
        return self.backend.put(chunk.key, value, names, in_front=info.lineage is Lineage.EXACT)

    def _marks(self, root: ChunkKey, token_ids: TokenIds) -> list[str]:
        """The names of the marks of a text. Those of other roots and other secrets differ."""
        naming = b"" if self._secret is None else self._secret.naming
        found = marks(token_ids, secret=naming, salt=bytes.fromhex(root))
        return [f"{mark:0{_MARK_DIGITS}x}" for mark in found.tolist()]

    def _find(
        self, root: ChunkKey, names: Sequence[str], keys: Sequence[ChunkKey]
    ) -> list[ChunkInfo]:
        nothing: list[tuple[ChunkKey, bytes]] = []
        infos = [
            info
            for key, header in self._ask(lambda: self.backend.find(names, keys), nothing)
            if key not in self._refused
            and (info := self._read_header(key, header)) is not None
            and info.root == root
        ]
        with self._lock:
            self._found += len(infos)
        return infos

    def _decode(
        self, key: ChunkKey, value: bytes, expected: codec.Expected | None
    ) -> KVChunk | None:
        """The chunk, or None after its value was deleted. A value that cannot be deleted, or that
        another version of KVBoost wrote, is not asked for again."""
        try:
            chunk = codec.decode(value, self._secret, expected)
            if chunk.key == key:
                return chunk
        except codec.OtherVersion:
            self._pass_over(key)
            return None
        except Exception:  # noqa: S110 - others write there too: no bytes may stop a request
            pass
        self._count("corrupt")
        if not self._ask(lambda: self._delete(key), False):
            self._refused.add(key)
        return None

    def _pass_over(self, key: ChunkKey) -> None:
        """Another version of KVBoost wrote ``key``: it stays there, and counts once."""
        with self._lock:
            if key in self._refused:
                return
            is_first = "version" not in self._faults
            self._refused.add(key)
        self._count("version")
        if is_first:
            log.warning(
                "The remote store holds chunks of another version of KVBoost. They are not used, "
                "and stay until the store evicts them."
            )

    def _delete(self, key: ChunkKey) -> bool:
        self.backend.delete(key)
        return True

    def _read_header(self, key: ChunkKey, header: bytes) -> ChunkInfo | None:
        try:
            info = codec.info(codec.read_header(header), self._secret)
        except codec.OtherVersion:
            self._pass_over(key)
            return None
        except codec.BadChunk:
            info = None
        if info is not None and info.key == key:
            return info
        self._count("corrupt")
        return None

    def _count(self, fault: Fault | Literal["version"]) -> None:
        with self._lock:
            self._faults[fault] = self._faults.get(fault, 0) + 1


def _mark_after(key: ChunkKey) -> str:
    """The mark of the chunks that follow ``key``: one too short for marks is found by it."""
    return key[:_MARK_DIGITS]


def _spread(names: list[str], limit: int) -> list[str]:
    """``names``, or ``limit`` of them at even distances."""
    if len(names) <= limit:
        return names
    return [names[number * len(names) // limit] for number in range(limit)]


def open_remote(
    url: str,
    max_bytes: int | None,
    *,
    socket_timeout: float = SOCKET_TIMEOUT,
    secret: Secret | None = None,
) -> RemoteTier:
    """The tier at ``url``: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://`` or
    ``unix://`` for a server, any URL that fsspec knows, or a path. Does not connect yet.

    ``max_bytes`` may be None for a server; then only the server's own limit applies. Raises
    ``ConfigError``.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme in _REDIS_SCHEMES:
        most = sys.maxsize if max_bytes is None else max_bytes
        backend = _redis(f"{_REDIS_SCHEMES[scheme]}://{rest}", most, socket_timeout)
    elif max_bytes is None:
        raise ConfigError(
            f"the remote store {_shown(url)!r} needs a budget in bytes; only a Redis or Valkey "
            "server may do without one, because it has its own limit"
        )
    else:
        backend = _fsspec(url, max_bytes, socket_timeout)
    return RemoteTier(backend, secret=secret)


def _redis(url: str, max_bytes: int, socket_timeout: float) -> Backend:
    try:
        from kvboost.cache.tiers.remote.redis import RedisBackend
    except ModuleNotFoundError as error:
        raise _missing(url, error) from None
    try:
        return RedisBackend(
            url, max_bytes, connect_timeout=CONNECT_TIMEOUT, socket_timeout=socket_timeout
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the URL {_shown(url)!r} cannot be used: {error}; it should look like "
            "redis://[user:password@]host[:port][/db] or unix:///path/to/socket"
        ) from None


def _fsspec(url: str, max_bytes: int, socket_timeout: float) -> Backend:
    try:
        from kvboost.cache.tiers.remote.fsspec import FsspecBackend
    except ModuleNotFoundError as error:
        raise _missing(url, error) from None
    try:
        return FsspecBackend(url, max_bytes, timeout=socket_timeout)
    except ImportError as error:
        raise ConfigError(
            f"the remote store {_shown(url)!r} needs one more package: {error}"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the remote store {_shown(url)!r} cannot be used: {error}; allowed are "
            f"{', '.join(f'{scheme}://' for scheme in _REDIS_SCHEMES)}, a path, and what fsspec "
            "knows, such as s3://, gs:// and file://"
        ) from None


def _missing(url: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"the remote store {_shown(url)!r} needs {error.name}; {install_extra('remote')}"
    )


def _shown(url: str) -> str:
    """``url`` without its password, for messages and logs."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://…"
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user:
        user = user.partition(":")[0] + ":…"
    query = "…" if "password" in parts.query else parts.query
    return parts._replace(netloc=user + at + host, query=query).geturl()
