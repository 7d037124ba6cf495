"""Chunks in a Redis or Valkey server that several machines use at once.

Everything has a name under ``kvboost:1:``::

    chunk:<key>    hash: writer   a random token of its writer
                         header   the value up to its tensors
                         0, 1, …  the rest, in pieces that do not block the server for long
                         marks    the names of its marks, 16 characters each
                         whole    the size it counts with; without it the chunk is only announced
    mark:<name>    the keys of up to four chunks that have this mark, the newest first
    part:<writer>  the same while it is being written; becomes the chunk
    accounts       hash: <key> → size of every chunk that is there or announced,
                         total, clock, ready
    used           sorted set: <key> by last use, in ticks of the clock

A script, which the server runs atomically, announces a chunk before its first byte is sent, and
evicts the least recently used ones until it fits. Pieces are written in transactions that check the
announcement at the end: if it is gone, they are removed. So the sum of all sizes never exceeds the
budget, however many writers there are. What a writer leaves unfinished expires. The server may
evict any of these keys on its own: a chunk without accounts is counted when it is met, accounts
without a chunk are dropped when they are met, and if the accounts themselves are lost, a scan
restores them.

Marks count towards their chunk's size, appear with it and are removed with it. If the server evicts
a chunk on its own, its marks are dropped when they are met, or expire 30 days after their last use.

The script uses keys that were not declared to it, so this works on one server, not on a cluster.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvboost.cache import codec
from kvboost.cache.tiers.remote.backend import Fault
from kvboost.cache.tiers.remote.redis_script import SCRIPT
from kvboost.tokens.hashing import ChunkKey

NAMESPACE = "kvboost:1:"
PIECE_BYTES = 1 << 20

_CHUNK = f"{NAMESPACE}chunk:"
_PART = f"{NAMESPACE}part:"
_ACCOUNTS = f"{NAMESPACE}accounts"
_USED = f"{NAMESPACE}used"
_MARK = f"{NAMESPACE}mark:"
_PIECES_AT_ONCE = 8  # the server reads or writes these in one go
_KEYS_AT_ONCE = 2000  # of a scan, which also passes marks
_KEY_LENGTH = 32
_UNFINISHED_SECONDS = 60
_MOST_FOUND = 256
_MOST_HEADER_BYTES = 2 << 20  # of all that are found: each is read while a request waits

MARK_BYTES = 320
"""The bytes that a mark counts with: more than the server needs for it."""

_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_NAMES = (_ACCOUNTS, _USED, _CHUNK, _PART, _MARK)


class RedisBackend:
    """Connections come from the client's pool, which supports threads and forks. Nothing is tried
    twice: that is the breaker's decision. Raises ``ValueError`` or ``TypeError`` if the client does
    not understand ``url``."""

    has_index = True

    def __init__(
        self, url: str, max_bytes: int, *, connect_timeout: float, socket_timeout: float
    ) -> None:
        self.max_bytes = max_bytes
        self._client = redis.Redis.from_url(
            url,
            socket_connect_timeout=connect_timeout,
            socket_timeout=socket_timeout,
            socket_read_size=1 << 18,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # 3 brings a conversation about maintenance with every connection
        )
        pool = self._client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # unknown options show only here

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, (redis.TimeoutError, TimeoutError)):
            return "timeout"
        if isinstance(error, redis.AuthenticationError):
            return "error"
        if isinstance(error, (redis.ConnectionError, OSError)):
            return "unreachable"
        # Servers before 7 wrap what went wrong inside a script.
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "-OOM command" in str(error):
            return "full"
        return "error"

    def get(self, key: ChunkKey, most_bytes: int | None = None) -> bytes | None:
        limits = PIECE_BYTES, codec.LONGEST_HEADER
        most = codec.MOST_BYTES if most_bytes is None else most_bytes
        found = self.run("open", key, most, *limits, _PIECES_AT_ONCE)
        if not found:
            return None
        if found == b"refused":
            return b""  # which is not a chunk
        writer, last, pieces = found
        while len(pieces) <= last:
            end = min(last, len(pieces) + _PIECES_AT_ONCE - 1)
            some = self.run("read", key, writer, len(pieces), end, *limits)
            if not some:
                return None  # evicted, or being written anew
            pieces += some
        return b"".join(pieces)

    def put(
        self, key: ChunkKey, value: bytes, marks: Sequence[str] = (), *, in_front: bool = True
    ) -> bool:
        size = _size(value, marks)
        if size > self.max_bytes:
            return False
        writer = secrets.token_hex(8)
        request = ("reserve", key, size, self.max_bytes, writer, _UNFINISHED_SECONDS)
        answer = self.run(*request)
        if answer == b"lost":
            self._recount()
            answer = self.run(*request)
        if answer != b"go":
            return bool(answer == b"here")
        try:
            return self._write(key, value, writer, marks, in_front=in_front)
        except redis.ResponseError:
            self.run("abandon", key, writer)
            raise

    def _write(
        self,
        key: ChunkKey,
        value: bytes,
        writer: str,
        marks: Sequence[str] = (),
        *,
        in_front: bool = True,
    ) -> bool:
        """Writes an announced chunk. False if its announcement was removed meanwhile."""
        part = _PART + writer
        pieces = list(_pieces(value))
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            pipeline = self._client.pipeline(transaction=True)
            for name, piece in pieces[start : start + _PIECES_AT_ONCE]:
                pipeline.hset(part, name, piece)
            pipeline.expire(part, _UNFINISHED_SECONDS)
            if start + _PIECES_AT_ONCE < len(pieces):
                step: tuple[Any, ...] = "go_on", key, writer
            else:
                names = "".join(marks)
                size = _size(value, marks)
                step = "finish", key, writer, size, len(pieces), names, int(in_front)
            pipeline.evalsha(_SHA, len(_NAMES), *_NAMES, *step)
            if not pipeline.execute()[-1]:
                return False
        return True

    def delete(self, key: ChunkKey) -> None:
        self.run("forget", key)

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [found == 1 for found in self.run("contains", *keys)]

    def keys(self) -> list[ChunkKey]:
        found: dict[ChunkKey, None] = {}  # a scan may meet one twice
        for some in self._scan():
            is_whole = self.contains_many(some)
            found |= {key: None for key, whole in zip(some, is_whole, strict=True) if whole}
        return list(found)

    def headers(self, keys: Sequence[ChunkKey]) -> list[bytes | None]:
        found = dict(self._find(keys, (), len(keys), len(keys) * codec.LONGEST_HEADER))
        return [found.get(key) for key in keys]

    def find(
        self, marks: Sequence[str], keys: Sequence[ChunkKey] = ()
    ) -> list[tuple[ChunkKey, bytes]]:
        return self._find(keys, marks, _MOST_FOUND, _MOST_HEADER_BYTES)

    def _find(
        self, keys: Sequence[ChunkKey], marks: Sequence[str], most: int, most_bytes: int
    ) -> list[tuple[ChunkKey, bytes]]:
        limits = most, most_bytes, codec.LONGEST_HEADER
        found = self.run("find", *limits, "".join(keys), "".join(marks))
        names = (ChunkKey(name.decode(errors="replace")) for name in found[::2])
        return list(zip(names, found[1::2], strict=True))

    def nbytes(self) -> int:
        return int(self.run("total"))

    def close(self) -> None:
        self._client.close()

    def run(self, *args: Any) -> Any:
        try:
            return self._client.evalsha(_SHA, len(_NAMES), *_NAMES, *args)
        except redis.exceptions.NoScriptError:
            self._client.script_load(SCRIPT)
            return self._client.evalsha(_SHA, len(_NAMES), *_NAMES, *args)

    def _recount(self) -> None:
        """Restores the accounts from what is there. Several clients may do so at once."""
        self.run("recount")
        for keys in self._scan():
            self.run("adopt", *keys)
        self.run("ready")

    def _scan(self) -> Iterator[list[ChunkKey]]:
        """The keys of all chunks, whole or not, some at a time. A key may appear twice. Names that
        are longer or shorter than ours stay on the server."""
        cursor, ours = 0, _CHUNK + _KEY_LENGTH * "?"
        while True:
            cursor, names = cast(
                tuple[int, list[bytes]], self._client.scan(cursor, match=ours, count=_KEYS_AT_ONCE)
            )
            if names:
                yield [ChunkKey(name.decode(errors="replace")[len(_CHUNK) :]) for name in names]
            if cursor == 0:
                return


def _pieces(value: bytes) -> Iterator[tuple[str, memoryview]]:
    view = memoryview(value)
    header = codec.header_length(value)
    yield "header", view[:header]
    for number, start in enumerate(range(header, len(value), PIECE_BYTES)):
        yield str(number), view[start : start + PIECE_BYTES]


def _size(value: bytes, marks: Sequence[str]) -> int:
    return len(value) + MARK_BYTES * len(marks)
