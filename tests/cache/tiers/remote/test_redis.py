from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.tiers.remote.breaker import Breaker
from kvboost.cache.tiers.remote.redis import PIECE_BYTES, RedisBackend
from kvboost.cache.tiers.remote.tier import RemoteTier
from kvboost.tokens.hashing import ChunkKey
from support.chunks import ROOT, make_chunk
from support.redis_server import RedisServer
from support.remote_stores import PLENTY, assert_same, big_chunk, opened, size_of, while_writing

REAL_BYTES = """
local total = 0
for _, prefix in ipairs({'chunk', 'part'}) do
  for _, name in ipairs(redis.call('KEYS', 'kvboost:1:' .. prefix .. ':*')) do
    for _, field in ipairs(redis.call('HKEYS', name)) do
      if field ~= 'writer' and field ~= 'whole' then
        total = total + redis.call('HSTRLEN', name, field)
      end
    end
  end
end
return total
"""


def redis_tier(
    server: RedisServer, breaker: Breaker | None = None, timeout: float = 1.0
) -> contextlib.closing[RemoteTier]:
    backend = RedisBackend(server.url, PLENTY, connect_timeout=0.25, socket_timeout=timeout)
    return contextlib.closing(RemoteTier(backend, breaker))


def name_of(chunk: KVChunk) -> str:
    return f"kvboost:1:chunk:{chunk.key}"


def real_bytes(server: RedisServer) -> int:
    return int(server.client.eval(REAL_BYTES, 0))  # type: ignore[arg-type]


def counted_bytes(server: RedisServer) -> int:
    return int(server.client.hget("kvboost:1:accounts", "total") or 0)  # type: ignore[arg-type]


def leave_memory(server: RedisServer, num_bytes: int) -> None:
    used: dict[str, Any] = server.client.info("memory")  # type: ignore[assignment]
    server.client.config_set("maxmemory", used["used_memory"] + num_bytes)


@pytest.mark.parametrize("kind", ["string", "list", "set"])
def test_a_key_of_another_type_is_a_fault_and_removed(kind: str, server: RedisServer) -> None:
    chunk = make_chunk([1, 2, 3])
    plant = {"string": server.client.set, "list": server.client.rpush, "set": server.client.sadd}
    plant[kind](name_of(chunk), "not a chunk")
    with opened(server.url) as tier:
        assert tier.contains_many([chunk.key])[0]  # there is something to be looked at
        assert tier.get(chunk.key) is None
        assert tier.faults == {"corrupt": 1}
        assert not server.client.exists(name_of(chunk))
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)
        assert tier.faults == {"corrupt": 1} and counted_bytes(server) == size_of(chunk)


def test_a_value_that_cannot_be_deleted_is_not_asked_for_again(server: RedisServer) -> None:
    chunk = make_chunk([1, 2, 3])

    class ReadOnly(RedisBackend):
        asked = 0

        def get(self, key: ChunkKey, most_bytes: int | None = None) -> bytes | None:
            ReadOnly.asked += 1
            return super().get(key, most_bytes)

        def delete(self, key: ChunkKey) -> None:
            raise OSError("read only")

    backend = ReadOnly(server.url, PLENTY, connect_timeout=0.25, socket_timeout=1.0)
    with contextlib.closing(RemoteTier(backend)) as tier:
        assert tier.put(chunk)
        server.client.hset(name_of(chunk), "0", b"damaged")
        for _ in range(3):
            assert tier.get(chunk.key) is None and not tier.contains_many([chunk.key])[0]
        assert ReadOnly.asked == 1 and tier.faults["corrupt"] == 1


def test_values_are_stored_in_pieces(server: RedisServer) -> None:
    chunk = big_chunk(1, 10 * PIECE_BYTES)  # more than one transaction
    with opened(server.url) as tier:
        assert tier.put(chunk)
        fields: dict[bytes, bytes] = server.client.hgetall(name_of(chunk))  # type: ignore[assignment]
        pieces = [fields[str(number).encode()] for number in range(len(fields) - 3)]
        assert len(pieces) == 10
        assert max(map(len, pieces)) <= 1 << 20
        assert_same(codec.decode(b"".join([fields[b"header"], *pieces])), chunk)
        assert codec.info(codec.read_header(fields[b"header"])).key == chunk.key
        assert server.client.ttl(name_of(chunk)) == -1
        assert server.client.keys("kvboost:1:part:*") == []
        assert_same(tier.get(chunk.key), chunk)


def test_many_keys_are_one_round_trip(server: RedisServer) -> None:
    chunks = [make_chunk([number]) for number in range(50)]
    with opened(server.url) as tier:
        assert all(tier.put(chunk) for chunk in chunks[::2])
        server.client.config_resetstat()
        there = tier.contains_many([chunk.key for chunk in chunks])
        assert there == [number % 2 == 0 for number in range(50)]
        calls: dict[str, Any] = server.client.info("commandstats")  # type: ignore[assignment]
        assert calls["cmdstat_evalsha"]["calls"] == 1


def test_chunks_that_are_read_are_evicted_later(server: RedisServer) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    with opened(server.url, max_bytes=3 * size_of(chunks[0])) as tier:
        assert all(tier.put(chunk) for chunk in chunks[:3])
        assert tier.get(chunks[0].key) is not None
        assert tier.put(chunks[3])
        there = tier.contains_many([chunk.key for chunk in chunks])
        assert there == [True, False, True, True]


def test_clients_together_keep_the_budget_at_every_moment(server: RedisServer) -> None:
    chunks = [big_chunk(number, 1 << 15) for number in range(60)]
    budget = 10 * size_of(chunks[0]) + 100
    with contextlib.ExitStack() as stack:
        tiers = [stack.enter_context(opened(server.url, max_bytes=budget)) for _ in range(4)]
        kept = [0] * 4

        def write(number: int) -> None:
            for index in range(len(chunks)):  # neighbours meet at the same chunks
                kept[number] += tiers[number].put(chunks[(index + 5 * number) % len(chunks)])

        most, num_samples = 0, 0
        for _ in while_writing(write):
            most = max(most, real_bytes(server), counted_bytes(server))
            num_samples += 1
        assert num_samples > 10
        assert size_of(chunks[0]) < most <= budget
        assert sum(kept) >= len(chunks)
        assert [tier.faults for tier in tiers] == [{}] * 4
        assert real_bytes(server) == tiers[0].nbytes == 10 * size_of(chunks[0])
        found = [tiers[1].get(key) for key in tiers[0].keys()]  # noqa: SIM118 - a tier is no dict
        assert len(found) == 10 and all(found)


def test_other_applications_values_are_neither_counted_nor_evicted(server: RedisServer) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    server.client.set("another:application", b"x" * 200_000)
    with opened(server.url, max_bytes=size_of(chunks[0])) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        assert tier.keys() == [chunks[-1].key]
        assert server.client.strlen("another:application") == 200_000


def test_without_a_budget_the_servers_own_limit_applies(server: RedisServer) -> None:
    with opened(server.url, max_bytes=None) as tier:
        assert tier.max_bytes == sys.maxsize
        assert tier.put(make_chunk([1]))


def test_a_server_that_is_stopped_and_restarted_is_used_again(own_server: RedisServer) -> None:
    now = 0.0
    chunk = big_chunk(1)
    with redis_tier(own_server, Breaker(clock=lambda: now)) as tier:
        assert tier.put(chunk)
        own_server.stop()
        assert [tier.get(chunk.key) for _ in range(50)] == [None] * 50
        assert tier.faults == {"unreachable": 3}
        assert not tier.put(chunk)
        assert (tier.nbytes, tier.keys(), list(tier.list_chunks().infos)) == (0, [], [])
        assert tier.state == "open"
        own_server.start()
        now = 1.0
        assert tier.get(chunk.key) is None  # the server has forgotten
        assert tier.state == "closed"
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)
        assert tier.faults == {"unreachable": 3}


def test_a_restart_between_two_calls_costs_nothing(own_server: RedisServer) -> None:
    with redis_tier(own_server) as tier:
        assert tier.put(make_chunk([1]))
        own_server.stop()
        own_server.start()
        assert tier.put(make_chunk([1]))
        assert tier.faults == {}


def test_a_stalled_server_delays_few_calls_and_not_for_long(own_server: RedisServer) -> None:
    now = 0.0
    chunk = big_chunk(1, 3 << 20)
    with redis_tier(own_server, Breaker(clock=lambda: now), timeout=0.5) as tier:
        assert tier.put(chunk)
        own_server.stall()
        assert [tier.get(chunk.key) for _ in range(20)] == [None] * 20
        assert not tier.put(big_chunk(2))
        assert tier.faults == {"timeout": 3}
        own_server.go_on()
        now = 1.0
        # Late answers to earlier questions must not be taken for this one's.
        assert_same(tier.get(chunk.key), chunk)


def test_nothing_is_tried_twice() -> None:
    accepted = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            nonlocal accepted
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    accepted += 1

        thread = threading.Thread(target=hang_up)
        thread.start()
        with opened(f"redis://127.0.0.1:{listener.getsockname()[1]}") as tier:
            for _ in range(2):
                assert tier.get(ROOT) is None
            assert tier.faults == {"unreachable": 2}
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert accepted == 2


def test_a_chunk_that_is_evicted_while_it_is_read_is_a_miss(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = big_chunk(1, 10 * PIECE_BYTES)  # more than one answer
    with redis_tier(server) as tier:
        backend = tier.backend
        assert isinstance(backend, RedisBackend)
        assert tier.put(chunk)
        run = backend.run

        def evict_meanwhile(*args: Any) -> Any:
            answer = run(*args)
            server.client.delete(name_of(chunk))
            return answer

        monkeypatch.setattr(backend, "run", evict_meanwhile)
        assert tier.get(chunk.key) is None
        assert tier.faults == {}


def test_a_full_server_keeps_serving(server: RedisServer) -> None:
    chunks = [big_chunk(number, 1 << 20) for number in range(3)]
    with opened(server.url) as tier:
        assert tier.put(chunks[0])
        leave_memory(server, 1 << 19)
        assert [tier.put(chunks[1]) for _ in range(4)] == [False] * 4
        assert tier.faults == {"full": 4}
        server.client.config_set("maxmemory", 1 << 20)  # not even the announcement fits
        assert not tier.put(chunks[2])
        assert tier.faults == {"full": 5}
        assert tier.state == "closed"
        assert_same(tier.get(chunks[0].key), chunks[0])
        assert tier.contains_many([chunk.key for chunk in chunks]) == [True, False, False]
        assert real_bytes(server) == tier.nbytes == size_of(chunks[0])
        server.client.config_set("maxmemory", 0)
        assert tier.put(chunks[1])


def test_accounts_of_chunks_that_the_server_evicted_are_dropped(server: RedisServer) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    size = size_of(chunks[0])
    with opened(server.url, max_bytes=4 * size) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        server.client.delete(*map(name_of, chunks[:3]))
        assert tier.get(chunks[0].key) is None
        assert tier.nbytes == 3 * size
        assert not tier.contains_many([chunks[1].key])[0]
        assert tier.nbytes == 2 * size
        assert tier.put(chunks[2])
        assert tier.nbytes == real_bytes(server) == 2 * size
        assert tier.faults == {}


@pytest.mark.parametrize("lost", ["accounts", "used", "accounts used"])
def test_lost_accounts_are_restored(server: RedisServer, lost: str) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    size = size_of(chunks[0])
    with opened(server.url, max_bytes=3 * size) as tier:
        assert all(tier.put(chunk) for chunk in chunks[:3])
        server.client.delete(*(f"kvboost:1:{name}" for name in lost.split()))
        assert tier.put(chunks[3])
        assert tier.nbytes == real_bytes(server) == 3 * size
        assert len(tier.keys()) == 3
        assert tier.faults == {}


def test_a_server_that_evicts_by_itself_is_not_a_fault(server: RedisServer) -> None:
    chunks = [big_chunk(number, 1 << 19) for number in range(40)]
    leave_memory(server, 6 << 20)
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    with opened(server.url) as tier:
        kept = [tier.put(chunk) for chunk in chunks]
        assert sum(kept) > 30
        found = [(chunk, tier.get(chunk.key)) for chunk in chunks]
        survivors = [(chunk, one) for chunk, one in found if one is not None]
        assert 0 < len(survivors) < len(chunks)
        for chunk, one in survivors:
            assert_same(one, chunk)
        assert tier.faults == {}
        assert tier.state == "closed"


def test_an_announced_chunk_is_a_miss_and_the_next_writer_replaces_it(server: RedisServer) -> None:
    chunk = big_chunk(1)
    value = codec.encode(chunk)
    with redis_tier(server) as tier:
        backend = tier.backend
        assert isinstance(backend, RedisBackend)
        assert tier.put(big_chunk(2))  # the accounts exist
        assert backend.run("reserve", chunk.key, len(value), PLENTY, "slow", 60) == b"go"
        server.client.hset("kvboost:1:part:slow", "header", value[:100])
        assert tier.get(chunk.key) is None
        assert not tier.contains_many([chunk.key])[0]
        assert tier.keys() == [big_chunk(2).key]
        assert 0 < server.client.ttl(name_of(chunk)) <= 60  # type: ignore[operator]
        assert tier.put(chunk)
        assert server.client.keys("kvboost:1:part:*") == []
        assert not backend._write(chunk.key, value, "slow")
        assert_same(tier.get(chunk.key), chunk)
        assert server.client.keys("kvboost:1:part:*") == []
        assert tier.nbytes == real_bytes(server) == len(value) + size_of(big_chunk(2))
        assert tier.faults == {}


def test_a_deleted_chunk_is_not_finished(server: RedisServer) -> None:
    chunk = big_chunk(1)
    value = codec.encode(chunk)
    with redis_tier(server) as tier:
        backend = tier.backend
        assert isinstance(backend, RedisBackend)
        assert tier.put(big_chunk(2))
        assert backend.run("reserve", chunk.key, len(value), PLENTY, "slow", 60) == b"go"
        tier.delete(chunk.key)
        assert not backend._write(chunk.key, value, "slow")
        assert tier.keys() == [big_chunk(2).key]
        assert real_bytes(server) == tier.nbytes == size_of(big_chunk(2))


def flip(server: RedisServer, chunk: KVChunk) -> None:
    piece = bytearray(server.client.hget(name_of(chunk), "0") or b"")  # type: ignore[arg-type]
    piece[100] ^= 1
    server.client.hset(name_of(chunk), "0", bytes(piece))


def cut(server: RedisServer, chunk: KVChunk) -> None:
    piece: bytes = server.client.hget(name_of(chunk), "0") or b""  # type: ignore[assignment]
    server.client.hset(name_of(chunk), "0", piece[:-1])


def lose(server: RedisServer, chunk: KVChunk) -> None:
    server.client.hdel(name_of(chunk), "0")


def exchange(server: RedisServer, chunk: KVChunk) -> None:
    """A whole chunk, but another's."""
    fields: Any = server.client.hgetall(name_of(big_chunk(9)))
    server.client.hset(name_of(chunk), mapping=fields)


def nonsense(server: RedisServer, chunk: KVChunk) -> None:
    server.client.hset(name_of(chunk), "header", b"\xff" * 50)


@pytest.mark.parametrize("damage", [flip, cut, lose, exchange, nonsense])
def test_damaged_values_are_counted_and_removed(
    server: RedisServer, damage: Callable[[RedisServer, KVChunk], None]
) -> None:
    chunk, other = big_chunk(1), big_chunk(9)
    with opened(server.url) as tier:
        assert tier.put(chunk) and tier.put(other)
        damage(server, chunk)
        assert tier.get(chunk.key) is None
        assert tier.faults == {"corrupt": 1}
        assert tier.keys() == [other.key]
        assert tier.nbytes == size_of(other)
        assert tier.state == "closed"
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)


def test_foreign_values_are_ignored(server: RedisServer) -> None:
    chunk, other = big_chunk(1), big_chunk(2)
    server.client.set(name_of(chunk), "not a chunk at all")
    server.client.hset(f"kvboost:1:chunk:{1:032x}", mapping={"whole": 3, "header": "abc"})
    server.client.hset("kvboost:1:chunk:nonsense", mapping={"whole": 3, "header": "abc"})
    server.client.hset("kvboost:1:chunk:worse", mapping={"whole": "three", "header": "abc"})
    with opened(server.url) as tier:
        assert tier.put(other)
        assert tier.get(chunk.key) is None
        assert tier.contains_many([chunk.key, other.key]) == [False, True]
        assert [info.key for info in tier.list_chunks().infos] == [other.key]
        assert tier.faults == {"corrupt": 1}
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)
