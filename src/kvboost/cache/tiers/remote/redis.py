"""Chunks in a Redis or Valkey server that several machines use at once.

Everything has a name under ``kvboost:1:``::

    chunk:<key>    hash: writer   a random token of its writer
                         header   the value up to its tensors
                         0, 1, …  the rest, in pieces that do not block the server for long
                         whole    the value's size; without it the chunk is only announced
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
from kvboost.tokens.hashing import ChunkKey

NAMESPACE = "kvboost:1:"
PIECE_BYTES = 1 << 20

_CHUNK = f"{NAMESPACE}chunk:"
_PART = f"{NAMESPACE}part:"
_ACCOUNTS = f"{NAMESPACE}accounts"
_USED = f"{NAMESPACE}used"
_PIECES_AT_ONCE = 8  # the server reads or writes these in one go
_KEYS_AT_ONCE = 500
_UNFINISHED_SECONDS = 60

# Commands that free memory come first wherever they are: on a full server a script may write
# anything once it has begun to write, and nothing before that.
_SCRIPT = """
local accounts, used, chunks, parts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call, pcall = redis.call, redis.pcall

local function field(key, name)  -- false if there is none, or something that is not ours
  local value = pcall('HGET', chunks .. key, name)
  return type(value) == 'string' and value
end

local function size_of(key)  -- false if it is not whole
  local size = field(key, 'whole')
  return size and size:match('^%d+$') and size
end

local function is_foreign(key)  -- something else than a hash has the name of a chunk
  local kind = call('TYPE', chunks .. key).ok
  return kind ~= 'hash' and kind ~= 'none'
end

local function is_lost()
  return call('HEXISTS', accounts, 'ready') == 0
    or call('HLEN', accounts) - 3 ~= call('ZCARD', used)
end

local function forget(key)
  local writer = field(key, 'writer')
  if writer then call('UNLINK', parts .. writer) end
  call('UNLINK', chunks .. key)
  call('ZREM', used, key)
  local size = call('HGET', accounts, key)
  if size then
    call('HDEL', accounts, key)
    call('HINCRBY', accounts, 'total', -size)
  end
end

local function use(key)  -- a full server, or one that is only a replica, refuses; never mind
  local now = pcall('HINCRBY', accounts, 'clock', 1)
  if type(now) == 'number' then pcall('ZADD', used, now, key) end
end

local function enter(key, size)
  call('HSET', accounts, key, size)
  call('HINCRBY', accounts, 'total', size)
  use(key)
end

local function is_gone(key)  -- counted, but the server has evicted it
  return call('HEXISTS', accounts, key) == 1 and call('EXISTS', chunks .. key) == 0
end

local act = {}

function act.contains()
  local found = {}
  for i = 2, #ARGV do
    found[i - 1] = (size_of(ARGV[i]) or is_foreign(ARGV[i])) and 1 or 0
    if is_gone(ARGV[i]) then forget(ARGV[i]) end
  end
  return found
end

function act.open(key)
  if is_foreign(key) then return 'foreign' end
  local size = size_of(key)
  if not size then
    if is_gone(key) then forget(key) end
    return false
  end
  if call('HEXISTS', accounts, key) == 1 then
    use(key)
  elseif not is_lost() and type(pcall('HINCRBY', accounts, 'total', 0)) == 'number' then
    enter(key, size)
  end
  return {field(key, 'writer'), call('HLEN', chunks .. key)}
end

function act.reserve(key, size, max_bytes, writer, seconds)
  if size_of(key) then return 'here' end
  if is_lost() then return 'lost' end
  forget(key)
  while call('HGET', accounts, 'total') + size > tonumber(max_bytes) do
    local oldest = call('ZRANGE', used, 0, 0)[1]
    if not oldest then
      call('HSET', accounts, 'total', 0)
      break
    end
    forget(oldest)
  end
  call('HSET', chunks .. key, 'writer', writer)
  call('EXPIRE', chunks .. key, seconds)
  enter(key, size)
  return 'go'
end

local function is_announced(key, writer)
  return field(key, 'writer') == writer and not size_of(key)
end

function act.go_on(key, writer)
  if is_announced(key, writer) then return 1 end
  call('UNLINK', parts .. writer)
  return 0
end

function act.finish(key, writer, size, fields)
  local part = parts .. writer
  if not is_announced(key, writer) or call('HLEN', part) ~= tonumber(fields) then
    call('UNLINK', part)
    return 0
  end
  call('HSET', part, 'writer', writer, 'whole', size)
  call('RENAME', part, chunks .. key)
  call('PERSIST', chunks .. key)
  use(key)
  return 1
end

function act.abandon(key, writer)
  call('UNLINK', parts .. writer)
  if is_announced(key, writer) then forget(key) end
end

act.forget = forget

function act.recount()  -- begins one, unless another client has
  local ready = call('HEXISTS', accounts, 'ready')
  if call('HLEN', accounts) - 2 - ready ~= call('ZCARD', used) then
    call('DEL', accounts, used)
    call('HSET', accounts, 'total', 0, 'clock', 0)
  end
end

function act.adopt()
  if call('HEXISTS', accounts, 'total') == 0 then return end
  for i = 2, #ARGV do
    local size = size_of(ARGV[i])
    if call('HEXISTS', accounts, ARGV[i]) == 0 then
      if size then enter(ARGV[i], size) else forget(ARGV[i]) end
    end
  end
end

function act.ready()
  call('HSET', accounts, 'ready', 1)
end

return act[ARGV[1]](ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
"""
_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_NAMES = (_ACCOUNTS, _USED, _CHUNK, _PART)


class RedisBackend:
    """Connections come from the client's pool, which supports threads and forks. Nothing is tried
    twice: that is the breaker's decision. Raises ``ValueError`` or ``TypeError`` if the client does
    not understand ``url``."""

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

    def get(self, key: ChunkKey) -> bytes | None:
        found = self._run("open", key)
        if not found:
            return None
        if found == b"foreign":
            return b""  # which is not a chunk
        writer, num_fields = found
        pieces: list[bytes | None] = []
        names = ["header", *map(str, range(num_fields - 3))]
        for start in range(0, len(names), _PIECES_AT_ONCE):
            pipeline = self._client.pipeline(transaction=False)
            for name in names[start : start + _PIECES_AT_ONCE]:
                pipeline.hget(_CHUNK + key, name)
            pipeline.hget(_CHUNK + key, "writer")
            *some, writer_now = pipeline.execute()
            if writer_now != writer:
                return None  # evicted, or being written anew
            pieces += some
        return b"".join(piece or b"" for piece in pieces)

    def put(self, key: ChunkKey, value: bytes) -> bool:
        if len(value) > self.max_bytes:
            return False
        writer = secrets.token_hex(8)
        request = ("reserve", key, len(value), self.max_bytes, writer, _UNFINISHED_SECONDS)
        answer = self._run(*request)
        if answer == b"lost":
            self._recount()
            answer = self._run(*request)
        if answer != b"go":
            return bool(answer == b"here")
        try:
            return self._write(key, value, writer)
        except redis.ResponseError:
            self._run("abandon", key, writer)
            raise

    def _write(self, key: ChunkKey, value: bytes, writer: str) -> bool:
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
                step = "finish", key, writer, len(value), len(pieces)
            pipeline.evalsha(_SHA, len(_NAMES), *_NAMES, *step)
            if not pipeline.execute()[-1]:
                return False
        return True

    def delete(self, key: ChunkKey) -> None:
        self._run("forget", key)

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [found == 1 for found in self._run("contains", *keys)]

    def keys(self) -> list[ChunkKey]:
        found: dict[ChunkKey, None] = {}  # a scan may meet one twice
        for some in self._scan():
            is_whole = self.contains_many(some)
            found |= {key: None for key, whole in zip(some, is_whole, strict=True) if whole}
        return list(found)

    def headers(self, keys: Sequence[ChunkKey]) -> list[bytes | None]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.hmget(_CHUNK + key, "header", "whole")
        return [
            None if isinstance(answer, redis.ResponseError) or answer[1] is None else answer[0]
            for answer in pipeline.execute(raise_on_error=False)
        ]

    def nbytes(self) -> int:
        total = self._client.hget(_ACCOUNTS, "total")
        return int(cast(bytes, total or b"0"))

    def close(self) -> None:
        self._client.close()

    def _run(self, *args: Any) -> Any:
        try:
            return self._client.evalsha(_SHA, len(_NAMES), *_NAMES, *args)
        except redis.exceptions.NoScriptError:
            self._client.script_load(_SCRIPT)
            return self._client.evalsha(_SHA, len(_NAMES), *_NAMES, *args)

    def _recount(self) -> None:
        """Restores the accounts from what is there. Several clients may do so at once."""
        self._run("recount")
        for keys in self._scan():
            self._run("adopt", *keys)
        self._run("ready")

    def _scan(self) -> Iterator[list[ChunkKey]]:
        """The keys of all chunks, whole or not, some at a time. A key may appear twice."""
        cursor = 0
        while True:
            cursor, names = cast(
                tuple[int, list[bytes]],
                self._client.scan(cursor, match=f"{_CHUNK}*", count=_KEYS_AT_ONCE),
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
