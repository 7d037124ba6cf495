from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from redis_server import MISSING, RedisServer

from chunks import ROOT, make_chunk
from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.compress import Packer, plain
from kvboost.cache.tiers import remote
from kvboost.cache.tiers.base import Tier
from kvboost.cache.tiers.fsspec_backend import FsspecBackend
from kvboost.cache.tiers.redis_backend import PIECE_BYTES, RedisBackend
from kvboost.cache.tiers.remote import Breaker, RemoteTier, open_remote
from kvboost.errors import ConfigError

PLENTY = 1 << 40
needs_redis = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

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


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if MISSING is not None:
        pytest.skip(MISSING)
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    """Empty and without limits."""
    running_server.client.flushall()
    running_server.client.script_flush()
    running_server.client.config_set("maxmemory", 0)
    running_server.client.config_set("maxmemory-policy", "noeviction")
    return running_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that may be stopped."""
    if MISSING is not None:
        pytest.skip(MISSING)
    made = RedisServer(tmp_path)
    made.start()
    yield made
    made.close()


class AsyncFolder(AsyncFileSystemWrapper):
    """A folder behind the interface of object stores; ``stalled``, it does not answer."""

    protocol = "asyncfolder"
    stalled = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(LocalFileSystem(auto_mkdir=True), **kwargs)

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return LocalFileSystem._strip_protocol(path.removeprefix("asyncfolder://"))

    async def _stall(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(60)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_cat_file", "_info") and AsyncFolder.stalled:
            name = "_stall"
        return super().__getattribute__(name)


@pytest.fixture(params=["redis", "folder", "memory", "async"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("asyncfolder", AsyncFolder, clobber=True)
    if request.param == "redis":
        yield request.getfixturevalue("server").url
    elif request.param == "memory":
        yield f"memory://{tmp_path.name}"
        with contextlib.suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    else:
        (tmp_path / "shared").mkdir()
        yield {"folder": "", "async": "asyncfolder://"}[request.param] + str(tmp_path / "shared")


@contextlib.contextmanager
def opened(url: str, max_bytes: int | None = PLENTY, **kwargs: Any) -> Iterator[RemoteTier]:
    tier = open_remote(url, max_bytes, **kwargs)
    try:
        yield tier
    finally:
        tier.close()


def redis_tier(
    server: RedisServer, breaker: Breaker | None = None, timeout: float = 1.0
) -> contextlib.closing[RemoteTier]:
    backend = RedisBackend(server.url, PLENTY, connect_timeout=0.25, socket_timeout=timeout)
    return contextlib.closing(RemoteTier(backend, breaker))


def big_chunk(number: int, num_bytes: int = 1 << 16) -> KVChunk:
    kv = torch.full((2, 1, 1, 8, num_bytes // 64), float(number))
    return make_chunk([number] * 8, data=plain(kv))


def packed_chunk() -> KVChunk:
    rows = torch.randn(2, 2, 2, 70, 16, generator=torch.Generator().manual_seed(7)).bfloat16()
    return make_chunk(range(70), data=Packer(4, None).pack(rows, 0), position=0)


def size_of(chunk: KVChunk) -> int:
    return len(codec.encode(chunk))


def name_of(chunk: KVChunk) -> str:
    return f"kvboost:1:chunk:{chunk.key}"


def file_of(folder: Path, chunk: KVChunk) -> Path:
    return folder / chunk.key[:2] / f"{chunk.key}.safetensors"


def as_plain(info: ChunkInfo) -> dict[str, Any]:
    return {**vars(info), "token_ids": info.token_ids.tolist()}


def assert_same(found: KVChunk | None, chunk: KVChunk) -> None:
    assert found is not None
    assert as_plain(found.info) == as_plain(chunk.info)
    assert found.data.tensors.keys() == chunk.data.tensors.keys()
    for name, tensor in chunk.data.tensors.items():
        assert found.data.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.data.tensors[name], tensor)


def real_bytes(server: RedisServer) -> int:
    return int(server.client.eval(REAL_BYTES, 0))  # type: ignore[arg-type]


def counted_bytes(server: RedisServer) -> int:
    return int(server.client.hget("kvboost:1:accounts", "total") or 0)  # type: ignore[arg-type]


def test_what_is_put_comes_back_elsewhere(url: str) -> None:
    chunks = [make_chunk([1, 2, 3]), packed_chunk(), big_chunk(5, 3 << 20)]
    with opened(url) as here, opened(url) as there:
        tier: Tier = here
        assert [tier.put(chunk) for chunk in chunks] == [True] * 3
        for chunk in chunks:
            assert_same(there.get(chunk.key), chunk)
        assert there.nbytes == tier.nbytes == sum(map(size_of, chunks))
        assert sorted(there.keys()) == sorted(chunk.key for chunk in chunks)
        infos = {info.key: as_plain(info) for info in there.infos()}
        assert infos == {chunk.key: as_plain(chunk.info) for chunk in chunks}
        stats = there.stats()
        assert (stats["hits"], stats["misses"], stats["faults"]) == (3, 0, {})
        assert here.stats()["puts"] == 3


def test_what_is_deleted_is_gone_and_no_longer_counted(url: str) -> None:
    first, second = make_chunk([1]), make_chunk([2])
    with opened(url) as tier:
        assert tier.put(first) and tier.put(second)
        tier.delete(first.key)
        tier.delete(first.key)
        assert tier.get(first.key) is None
        assert tier.contains_many([first.key, second.key]) == [False, True]
        assert tier.keys() == [second.key]
        assert tier.nbytes == size_of(second)
        assert (tier.stats()["misses"], tier.faults) == (1, {})


def test_an_empty_store_is_no_fault(url: str) -> None:
    with opened(url) as tier:
        assert tier.get(make_chunk([1]).key) is None
        assert (tier.keys(), list(tier.infos()), tier.nbytes) == ([], [], 0)
        assert tier.contains_many([]) == []
        tier.delete(make_chunk([1]).key)
        assert tier.faults == {}


def test_what_is_there_is_not_written_twice(url: str) -> None:
    chunk = big_chunk(1)
    with opened(url) as tier:
        assert tier.put(chunk) and tier.put(chunk)
        assert tier.nbytes == size_of(chunk)


def test_what_exceeds_the_budget_alone_moves_nothing(url: str) -> None:
    small, large = make_chunk([1]), big_chunk(2)
    with opened(url, max_bytes=size_of(large) - 1) as tier:
        assert tier.put(small)
        assert not tier.put(large)
        assert tier.keys() == [small.key]
        assert tier.faults == {}


def test_the_oldest_go_first(url: str) -> None:
    chunks = [big_chunk(number) for number in range(5)]
    with opened(url, max_bytes=3 * size_of(chunks[0])) as tier:
        for chunk in chunks:
            assert tier.put(chunk)
            assert tier.nbytes <= tier.max_bytes
        assert tier.contains_many([chunk.key for chunk in chunks]) == [False] * 2 + [True] * 3


def test_a_closed_tier_misses(url: str) -> None:
    chunk = make_chunk([1])
    with opened(url) as tier:
        assert tier.put(chunk)
    assert tier.get(chunk.key) is None
    assert not tier.put(chunk)
    assert not tier.contains(chunk.key)


def test_headers_longer_than_most_are_read_too(url: str) -> None:
    chunk = make_chunk(range(3000), data=plain(torch.zeros(2, 1, 1, 3000, 1)))
    assert codec.header_length(codec.encode(chunk)) > codec.HEADER_BYTES
    with opened(url) as tier:
        assert tier.put(chunk)
        assert [as_plain(info) for info in tier.infos()] == [as_plain(chunk.info)]


def test_values_lie_there_in_pieces(server: RedisServer) -> None:
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


def test_what_is_read_stays(server: RedisServer) -> None:
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

        threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        most, num_samples = 0, 0
        while any(thread.is_alive() for thread in threads):
            most = max(most, real_bytes(server), counted_bytes(server))
            num_samples += 1
        for thread in threads:
            thread.join()
        assert num_samples > 10
        assert size_of(chunks[0]) < most <= budget
        assert sum(kept) >= len(chunks)
        assert [tier.faults for tier in tiers] == [{}] * 4
        assert real_bytes(server) == tiers[0].nbytes == 10 * size_of(chunks[0])
        found = [tiers[1].get(key) for key in tiers[0].keys()]  # noqa: SIM118 - a tier is no dict
        assert len(found) == 10 and all(found)


def test_others_values_are_neither_counted_nor_evicted(server: RedisServer) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    server.client.set("somebody:else", b"x" * 200_000)
    with opened(server.url, max_bytes=size_of(chunks[0])) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        assert tier.keys() == [chunks[-1].key]
        assert server.client.strlen("somebody:else") == 200_000


def test_without_a_budget_the_servers_own_holds(server: RedisServer) -> None:
    with opened(server.url, max_bytes=None) as tier:
        assert tier.max_bytes == sys.maxsize
        assert tier.put(make_chunk([1]))


def test_a_stopped_server_is_missed_and_found_again(own_server: RedisServer) -> None:
    now = 0.0
    chunk = big_chunk(1)
    with redis_tier(own_server, Breaker(clock=lambda: now)) as tier:
        assert tier.put(chunk)
        own_server.stop()
        assert [tier.get(chunk.key) for _ in range(50)] == [None] * 50
        assert tier.faults == {"unreachable": 3}
        assert not tier.put(chunk)
        assert (tier.nbytes, tier.keys(), list(tier.infos())) == (0, [], [])
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


def test_a_stalled_server_holds_up_few_calls_and_not_for_long(own_server: RedisServer) -> None:
    now = 0.0
    chunk = big_chunk(1, 3 << 20)
    with redis_tier(own_server, Breaker(clock=lambda: now), timeout=0.2) as tier:
        assert tier.put(chunk)
        own_server.stall()
        begin = time.monotonic()
        assert [tier.get(chunk.key) for _ in range(20)] == [None] * 20
        assert not tier.put(big_chunk(2))
        assert 0.5 < time.monotonic() - begin < 5
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


def test_a_chunk_that_goes_while_it_is_read_is_a_miss(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = big_chunk(1)
    with redis_tier(server) as tier:
        backend = tier._backend
        assert isinstance(backend, RedisBackend)
        assert tier.put(chunk)
        run = backend._run

        def evict_behind(*args: Any) -> Any:
            answer = run(*args)
            server.client.delete(name_of(chunk))
            return answer

        monkeypatch.setattr(backend, "_run", evict_behind)
        assert tier.get(chunk.key) is None
        assert tier.faults == {}


def test_a_full_server_keeps_serving(server: RedisServer) -> None:
    chunks = [big_chunk(number, 1 << 20) for number in range(3)]
    with opened(server.url) as tier:
        assert tier.put(chunks[0])
        used: dict[str, Any] = server.client.info("memory")  # type: ignore[assignment]
        server.client.config_set("maxmemory", used["used_memory"] + (1 << 19))
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


def test_chunks_that_the_server_evicts_are_dropped_when_they_are_met(server: RedisServer) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    size = size_of(chunks[0])
    with opened(server.url, max_bytes=4 * size) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        server.client.delete(*map(name_of, chunks[:3]))
        assert tier.get(chunks[0].key) is None
        assert tier.nbytes == 3 * size
        assert not tier.contains(chunks[1].key)
        assert tier.nbytes == 2 * size
        assert tier.put(chunks[2])
        assert tier.nbytes == real_bytes(server) == 2 * size
        assert tier.faults == {}


@pytest.mark.parametrize("lost", ["accounts", "used", "accounts used"])
def test_lost_accounts_are_made_anew(server: RedisServer, lost: str) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    size = size_of(chunks[0])
    with opened(server.url, max_bytes=3 * size) as tier:
        assert all(tier.put(chunk) for chunk in chunks[:3])
        server.client.delete(*(f"kvboost:1:{name}" for name in lost.split()))
        assert tier.put(chunks[3])
        assert tier.nbytes == real_bytes(server) == 3 * size
        assert len(tier.keys()) == 3
        assert tier.faults == {}


def test_a_server_that_evicts_by_itself_is_no_fault(server: RedisServer) -> None:
    chunks = [big_chunk(number, 1 << 19) for number in range(40)]
    used: dict[str, Any] = server.client.info("memory")  # type: ignore[assignment]
    server.client.config_set("maxmemory", used["used_memory"] + (6 << 20))
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


def test_an_announced_chunk_is_a_miss_and_given_to_the_next_writer(server: RedisServer) -> None:
    chunk = big_chunk(1)
    value = codec.encode(chunk)
    with redis_tier(server) as tier:
        backend = tier._backend
        assert isinstance(backend, RedisBackend)
        assert tier.put(big_chunk(2))  # the accounts exist
        assert backend._run("reserve", chunk.key, len(value), PLENTY, "slow", 60) == b"go"
        server.client.hset("kvboost:1:part:slow", "header", value[:100])
        assert tier.get(chunk.key) is None
        assert not tier.contains(chunk.key)
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
        backend = tier._backend
        assert isinstance(backend, RedisBackend)
        assert tier.put(big_chunk(2))
        assert backend._run("reserve", chunk.key, len(value), PLENTY, "slow", 60) == b"go"
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


def test_foreign_values_are_passed_over(server: RedisServer) -> None:
    chunk, other = big_chunk(1), big_chunk(2)
    server.client.set(name_of(chunk), "not a chunk at all")
    server.client.hset("kvboost:1:chunk:nonsense", mapping={"whole": 3, "header": "abc"})
    server.client.hset("kvboost:1:chunk:worse", mapping={"whole": "three", "header": "abc"})
    with opened(server.url) as tier:
        assert tier.put(other)
        assert tier.get(chunk.key) is None
        assert tier.contains_many([chunk.key, other.key]) == [False, True]
        assert [info.key for info in tier.infos()] == [other.key]
        assert tier.faults == {"corrupt": 1}
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_may_go_on(url: str) -> None:
    if url.startswith(("memory:", "asyncfolder:")):
        pytest.skip("memory is not shared, and the wrapper's threads end with the fork")
    chunks = [big_chunk(number) for number in range(3)]
    with opened(url) as tier:
        assert tier.put(chunks[0])
        child = os.fork()
        if child == 0:
            os._exit(0 if tier.get(chunks[0].key) and tier.put(chunks[1]) else 1)
        assert tier.put(chunks[2])
        assert os.waitpid(child, 0)[1] == 0
        for chunk in chunks:
            assert_same(tier.get(chunk.key), chunk)


def test_files_lie_where_their_key_says(tmp_path: Path) -> None:
    chunk = packed_chunk()
    with opened(f"file://{tmp_path}") as tier:
        assert tier.put(chunk)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file_of(tmp_path, chunk)]
    assert_same(codec.read_file(file_of(tmp_path, chunk)), chunk)


def test_what_lies_there_counts_and_goes_by_age(tmp_path: Path) -> None:
    chunks = [big_chunk(number) for number in range(4)]
    with opened(str(tmp_path)) as tier:
        assert all(tier.put(chunk) for chunk in chunks[:3])
    for age, chunk in enumerate([chunks[1], chunks[0], chunks[2]]):
        os.utime(file_of(tmp_path, chunk), (age, age))
    left_over = tmp_path / "ab" / ".abcd.0123.tmp"  # of a writer that died, long ago
    left_over.parent.mkdir(exist_ok=True)
    left_over.write_bytes(b"x" * 10)
    os.utime(left_over, (-1, -1))
    (tmp_path / "README").write_text("not ours")
    with opened(str(tmp_path), max_bytes=3 * size_of(chunks[0])) as tier:
        assert tier.nbytes == 3 * size_of(chunks[0]) + 10
        assert tier.put(chunks[3])
        there = tier.contains_many([chunk.key for chunk in chunks])
        assert there == [True, False, True, True]
        assert not left_over.exists()
        assert (tmp_path / "README").exists()


def test_threads_together_keep_the_budget_at_every_moment(tmp_path: Path) -> None:
    chunks = [big_chunk(number, 1 << 15) for number in range(60)]
    budget = 10 * size_of(chunks[0]) + 100

    def on_disk() -> int:
        total = 0
        for path in tmp_path.rglob("*.*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    with opened(str(tmp_path), max_bytes=budget) as tier:

        def write(number: int) -> None:
            for index in range(len(chunks)):
                tier.put(chunks[(index + 5 * number) % len(chunks)])

        threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        counted = []
        while any(thread.is_alive() for thread in threads):
            counted.append(tier.nbytes)
        for thread in threads:
            thread.join()
        assert max(counted) <= budget
        assert tier.faults == {}
        assert tier.nbytes == on_disk() <= budget
        assert on_disk() >= 8 * size_of(chunks[0])


def test_another_writers_files_are_seen_in_time(tmp_path: Path) -> None:
    chunks = [big_chunk(number) for number in range(40)]
    budget = 16 * size_of(chunks[0])
    with opened(str(tmp_path), budget) as first, opened(str(tmp_path), budget) as second:
        for mine, yours in zip(chunks[::2], chunks[1::2], strict=True):
            assert first.put(mine) and second.put(yours)
            there = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
            assert there <= budget * 10 // 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:50],
        lambda data: b"",
        lambda data: data[:-1] + b"!",
    ],
    ids=["cut", "header only", "empty", "changed"],
)
def test_damaged_files_are_counted_and_removed(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    chunk = big_chunk(1)
    with opened(str(tmp_path)) as tier:
        assert tier.put(chunk)
        path = file_of(tmp_path, chunk)
        path.write_bytes(damage(path.read_bytes()))
        assert len(list(tier.infos())) + tier.faults.get("corrupt", 0) == 1
        assert tier.get(chunk.key) is None
        assert not path.exists()
        assert tier.faults["corrupt"] >= 1
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)


def test_a_file_under_anothers_name_is_no_hit(tmp_path: Path) -> None:
    chunk, other = big_chunk(1), big_chunk(2)
    path = file_of(tmp_path, chunk)
    path.parent.mkdir()
    path.write_bytes(codec.encode(other))
    with opened(str(tmp_path)) as tier:
        assert list(tier.infos()) == []
        assert tier.get(chunk.key) is None
        assert tier.faults == {"corrupt": 2}


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("name", ["pipe_file", "mv"])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chunks = [big_chunk(1), big_chunk(2)]
    with opened(str(tmp_path)) as tier:
        assert tier.put(chunks[0])
        with monkeypatch.context() as patch:
            patch.setattr(LocalFileSystem, name, failing(OSError(errno.ENOSPC, "no space")))
            assert [tier.put(chunks[1]) for _ in range(4)] == [False] * 4
        assert tier.faults == {"full": 4}
        assert tier.state == "closed"
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files == [file_of(tmp_path, chunks[0])]
        assert tier.nbytes == size_of(chunks[0])
        assert tier.put(chunks[1])


def test_what_cannot_be_deleted_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [big_chunk(1), big_chunk(2)]
    with opened(str(tmp_path), max_bytes=size_of(chunks[0])) as tier:
        assert tier.put(chunks[0])
        monkeypatch.setattr(LocalFileSystem, "rm_file", failing(PermissionError("not yours")))
        assert not tier.put(chunks[1])
        assert tier.keys() == [chunks[0].key]
        assert tier.nbytes == size_of(chunks[0])


def test_a_folder_that_is_none_opens_the_breaker(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with opened(str(tmp_path / "file" / "folder")) as tier:
        assert [tier.get(make_chunk([1]).key) for _ in range(9)] == [None] * 9
        assert tier.faults == {"unreachable": 3}
        assert tier.state == "open"
        assert tier.nbytes == 0


def test_a_stalled_store_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("asyncfolder", AsyncFolder, clobber=True)
    chunk = big_chunk(1)
    with opened(f"asyncfolder://{tmp_path}", socket_timeout=0.04) as tier:
        assert tier.put(chunk)
        monkeypatch.setattr(AsyncFolder, "stalled", True)
        begin = time.monotonic()
        assert tier.get(chunk.key) is None
        assert not tier.contains(chunk.key)
        assert not tier.put(big_chunk(2))
        assert not tier.put(big_chunk(2))
        assert time.monotonic() - begin < 10
        assert tier.faults == {"timeout": 3}


def test_a_file_deleted_while_it_is_written_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = big_chunk(1)
    move = LocalFileSystem.mv
    with opened(str(tmp_path)) as tier:

        def delete_first(*args: Any, **kwargs: Any) -> None:
            tier.delete(chunk.key)
            move(*args, **kwargs)

        monkeypatch.setattr(LocalFileSystem, "mv", delete_first)
        assert not tier.put(chunk)
        assert (tier.keys(), tier.nbytes, tier.faults) == ([], 0, {})


def test_an_eviction_does_not_take_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [big_chunk(1), big_chunk(2)]
    move = LocalFileSystem.mv
    answers = []
    with opened(str(tmp_path), max_bytes=size_of(chunks[0])) as tier:

        def write_another_first(*args: Any, **kwargs: Any) -> None:
            if not answers:
                answers.append(tier.put(chunks[1]))
            move(*args, **kwargs)

        monkeypatch.setattr(LocalFileSystem, "mv", write_another_first)
        assert tier.put(chunks[0])
        assert answers == [False]
        assert tier.keys() == [chunks[0].key]


@needs_redis
@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_servers_are_reached_by_either_name(scheme: str) -> None:
    with opened(f"{scheme}://localhost:1/0", None) as tier:
        assert tier.get(make_chunk([1]).key) is None
        assert tier.faults == {"unreachable": 1}


@pytest.mark.parametrize(
    ("url", "max_bytes", "message"),
    [
        ("nonsense://x", 1, r"nonsense.*allowed are redis://.*s3://.*kvboost\[remote\]"),
        ("redis://localhost:port", 1, r"redis://localhost:port.*should look like redis://"),
        ("redis://localhost?nonsense=1", 1, r"nonsense.*should look like redis://"),
        ("/some/folder", None, r"/some/folder.*needs a budget"),
    ],
)
def test_bad_urls_say_what_is_allowed(url: str, max_bytes: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_remote(url, max_bytes)


def test_options_for_a_server_stand_in_its_url() -> None:
    with pytest.raises(ConfigError, match=r"'anon'.*in the URL"):
        open_remote("redis://localhost", 1, storage_options={"anon": True})


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        open_remote("redis://me:secret@localhost:port?password=secret", 1)
    assert "me:…@localhost" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_store_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("kvboost.cache.tiers.fsspec_backend.get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"'s3://bucket'.*Install s3fs"):
        open_remote("s3://bucket", 1)


@pytest.mark.parametrize(
    ("url", "package"), [("redis://localhost", "redis"), ("/some/folder", "fsspec")]
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    monkeypatch.delitem(sys.modules, f"kvboost.cache.tiers.{package}_backend")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"'{package}.*pip install 'kvboost\[remote\]'"):
        open_remote(url, 1)


def test_the_tier_itself_needs_no_extra() -> None:
    tree = ast.parse(inspect.getsource(remote))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names.isdisjoint({"redis", "fsspec"})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def call(breaker: Breaker, succeeds: bool) -> bool:
    """Whether a call was let through."""
    ticket = breaker.enter()
    if ticket is None:
        return False
    breaker.leave(ticket, succeeds)
    return True


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(clock=Clock())
    for succeeds in (False, False, True, False, False):
        assert call(breaker, succeeds)
    assert breaker.state == "closed"
    assert call(breaker, False)
    assert breaker.state == "open"
    assert not call(breaker, True)


def test_pauses_double_up_to_the_longest_and_begin_anew_after_success() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    for _ in range(3):
        call(breaker, False)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        clock.now += pause - 0.01
        assert (breaker.state, call(breaker, False)) == ("open", False)
        clock.now += 0.01
        assert breaker.state == "half-open"
        assert call(breaker, False)
    clock.now += 30
    assert call(breaker, True)
    assert breaker.state == "closed"
    for _ in range(3):
        assert call(breaker, False)
    clock.now += 1
    assert breaker.state == "half-open"


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    for _ in range(3):
        call(breaker, False)
    clock.now += 1
    trial = breaker.enter()
    assert trial is not None
    assert breaker.enter() is None
    clock.now += 100  # a trial may take its time
    assert (breaker.state, breaker.enter()) == ("half-open", None)
    breaker.leave(trial, True)
    assert (breaker.state, call(breaker, True)) == ("closed", True)


def test_calls_of_before_say_nothing_about_now() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    early = [breaker.enter() for _ in range(5)]
    for _ in range(3):
        call(breaker, False)
    clock.now += 1
    trial = breaker.enter()
    for ticket in early:
        assert ticket is not None
        breaker.leave(ticket, False)
    assert trial is not None
    breaker.leave(trial, True)
    assert breaker.state == "closed"


def test_an_interrupted_trial_is_a_failed_one() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    for _ in range(3):
        call(breaker, False)
    clock.now += 1

    class Interrupted(FsspecBackend):
        def get(self, key: Any) -> bytes | None:
            raise KeyboardInterrupt

    tier = RemoteTier(Interrupted("memory://x", 1, timeout=1, options={}), breaker)
    with pytest.raises(KeyboardInterrupt):
        tier.get(ROOT)
    assert breaker.state == "open"
    clock.now += 2
    assert call(breaker, True)
