"""Values that others made large: they are not received, and count as damaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.quantize import KVFormat, plain
from kvboost.cache.tiers.remote.redis import PIECE_BYTES
from support.chunks import make_chunk
from support.redis_server import RedisServer
from support.remote_stores import PLENTY, assert_same, big_chunk, opened

LARGE = b"x" * (32 << 20)
TOKENS = 8
FORMAT = KVFormat(2, 1, 4, torch.float32)


def expected(chunk: KVChunk, format: KVFormat = FORMAT) -> codec.Expected:
    return codec.Expected(chunk.info, format)


def received(server: RedisServer) -> int:
    """The bytes that clients have received."""
    stats: Any = server.client.info("stats")
    return int(stats["total_net_output_bytes"])


def name_of(chunk: KVChunk) -> str:
    return f"kvboost:1:chunk:{chunk.key}"


def test_what_is_expected_is_received_whole() -> None:
    chunk = make_chunk(range(TOKENS))
    assert len(codec.encode(chunk)) <= expected(chunk).most_bytes < 2 << 20
    for bits in (4, 8, 16):
        format = KVFormat(2, 1, 4, torch.bfloat16, bits)
        assert format.most_bytes(100, 0) >= 2 * 2 * 100 * 4 * 2  # it may be stored in 16 bits


HUGE_FIELDS: dict[str, dict[str, Any]] = {
    "a huge header": {"header": LARGE},
    "a huge piece": {"0": LARGE},
    "one piece more": {"1": LARGE},
    "a hundred pieces": {str(number): LARGE[: 1 << 19] for number in range(100)},
    "a huge writer": {"writer": LARGE},
    "a huge size": {"whole": b"1" * len(LARGE)},
    "a piece a little too long": {"0": bytes(PIECE_BYTES + 1)},
}


@pytest.mark.parametrize("fields", HUGE_FIELDS)
def test_a_huge_value_in_redis_is_a_fault_that_is_not_received(
    fields: str, server: RedisServer
) -> None:
    chunk = make_chunk(range(TOKENS))
    with opened(server.url) as tier:
        assert tier.put(chunk)
        server.client.hset(name_of(chunk), mapping=HUGE_FIELDS[fields])
        before = received(server)
        assert tier.get(chunk.key, expected(chunk)) is None
        assert received(server) - before < 100_000
        if fields != "a huge size":  # that one is not whole, and like one that is being written
            assert tier.faults == {"corrupt": 1} and not server.client.exists(name_of(chunk))
            assert tier.put(chunk)
            assert_same(tier.get(chunk.key, expected(chunk)), chunk)


def test_a_value_that_grows_while_it_is_read_is_not_received(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = big_chunk(1, 10 * PIECE_BYTES)
    with opened(server.url) as tier:
        assert tier.put(chunk)
        run = tier.backend.run

        def grow(*args: Any) -> Any:
            answer = run(*args)
            server.client.hset(name_of(chunk), "9", LARGE)
            return answer

        monkeypatch.setattr(tier.backend, "run", grow)
        before = received(server)
        assert tier.get(chunk.key) is None
        assert received(server) - before < 11 * PIECE_BYTES
        assert tier.faults == {"corrupt": 1}


def test_a_chunk_of_usual_size_takes_one_round_trip(server: RedisServer) -> None:
    chunk = big_chunk(1, 3 << 20)
    with opened(server.url) as tier:
        assert tier.put(chunk)
        server.client.config_resetstat()
        assert_same(tier.get(chunk.key), chunk)
        calls: Any = server.client.info("commandstats")
        assert calls["cmdstat_evalsha"]["calls"] == 1


def test_huge_headers_are_not_received(server: RedisServer) -> None:
    honest, huge = make_chunk(range(TOKENS)), make_chunk(range(1, TOKENS))
    with opened(server.url) as tier:
        assert tier.put(honest) and tier.put(huge)
        server.client.hset(name_of(huge), "header", LARGE)
        before = received(server)
        assert [info.key for info in tier.list_chunks().infos] == [honest.key]
        assert received(server) - before < 100_000


def test_huge_names_and_sums_are_not_received(server: RedisServer) -> None:
    chunk = make_chunk(range(TOKENS))
    with opened(server.url) as tier:
        assert tier.put(chunk)
        server.client.hset("kvboost:1:chunk:" + "a" * (1 << 20), "whole", "1")
        server.client.hset("kvboost:1:accounts", "total", LARGE)
        before = received(server)
        assert tier.keys() == [chunk.key] and tier.nbytes == 0
        assert received(server) - before < 100_000
        assert tier.faults == {}


def test_an_index_answers_with_so_many_headers_of_so_many_bytes(server: RedisServer) -> None:
    """Others have given one mark many chunks, and these long headers."""
    ids = list(range(1, 200))
    chunk = make_chunk(ids, data=plain(torch.zeros(2, 1, 1, len(ids), 1)))
    with opened(server.url) as tier:
        assert tier.put(chunk)
        marks: Any = server.client.keys("kvboost:1:mark:*")
        for number, mark in enumerate(marks):
            keys = [f"{4 * number + one:032x}" for one in range(4)]
            server.client.set(mark, "".join(keys))
            for key in keys:
                fields = {"whole": 1, "writer": "w", "header": LARGE[: 1 << 20]}
                server.client.hset(f"kvboost:1:chunk:{key}", mapping=fields)
        assert 4 * len(marks) > 20
        before = received(server)
        assert tier.find(chunk.info.root, [chunk.info.token_ids]) == []
        assert received(server) - before < 3 << 20


@pytest.mark.parametrize("url", ["folder", "memory", "async"], indirect=True)
def test_a_huge_file_in_an_object_store_is_a_fault_that_is_not_read(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk(range(TOKENS))
    with opened(url, PLENTY) as tier:
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key, expected(chunk)), chunk)
        backend = tier.backend
        backend._do("pipe_file", backend._path(chunk.key), LARGE)
        read: list[int] = []
        do = backend._do

        def counted(name: str, *args: Any, **kwargs: Any) -> Any:
            answer = do(name, *args, **kwargs)
            read.extend([len(answer)] if name == "cat_file" else [])
            return answer

        monkeypatch.setattr(backend, "_do", counted)
        assert tier.get(chunk.key, expected(chunk)) is None
        assert read == [expected(chunk).most_bytes + 1]
        assert tier.faults == {"corrupt": 1} and not tier.contains_many([chunk.key])[0]
