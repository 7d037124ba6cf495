"""Finding chunks in Redis by the marks of their text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.quantize import plain
from kvboost.cache.secret import Secret
from kvboost.cache.tiers.remote.redis import MARK_BYTES, RedisBackend
from kvboost.cache.tiers.remote.redis_script import SCRIPT
from kvboost.cache.tiers.remote.tier import RemoteTier
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, branch_key, chain_key, root_key
from kvboost.tokens.marks import marks
from support.chunks import ROOT, make_chunk
from support.redis_server import RedisServer
from support.remote_stores import PLENTY, assert_same, counted_size, opened, size_of, while_writing

MARK = "kvboost:1:mark:"
MARK_SECONDS = 30 * 24 * 3600


def text(seed: int, num_tokens: int = 128) -> TokenIds:
    return as_token_ids(np.random.default_rng(seed).integers(0, 50_000, num_tokens))


def moved(ids: Sequence[int], seed: int = 99) -> TokenIds:
    """``ids`` between other tokens."""
    return as_token_ids(np.concatenate([text(seed, 77), ids, text(seed + 1, 50)]))


def names(ids: TokenIds, root: ChunkKey = ROOT) -> list[str]:
    return [f"{MARK}{mark:016x}" for mark in marks(ids, salt=bytes.fromhex(root)).tolist()]


def marks_in(server: RedisServer) -> list[bytes]:
    return server.client.keys(f"{MARK}*")  # type: ignore[return-value]


def found_by(tier: RemoteTier, ids: TokenIds, root: ChunkKey = ROOT) -> list[ChunkKey]:
    return [info.key for info in tier.find(root, [ids])]


def calls(server: RedisServer) -> int:
    stats: dict[str, Any] = server.client.info("commandstats")  # type: ignore[assignment]
    return int(stats["cmdstat_evalsha"]["calls"])


def test_another_client_finds_a_chunk_at_another_position_in_one_round_trip(server) -> None:
    chunk, other = make_chunk(text(1)), make_chunk(text(2))
    with opened(server.url) as here, opened(server.url) as there:
        assert here.put(chunk) and here.put(other)
        server.client.config_resetstat()
        (info,) = there.find(ROOT, [text(3), moved(chunk.info.token_ids)])
        assert calls(server) == 1
        assert info.key == chunk.key and info.token_ids.tolist() == text(1).tolist()
        assert found_by(there, text(3)) == []
        stats = there.stats()
        assert (stats.searches, stats.found, stats.faults) == (2, 1, {})
        assert_same(there.get(chunk.key), chunk)


def test_a_passage_of_a_chunk_is_enough(server) -> None:
    chunk = make_chunk(text(1))
    with opened(server.url) as tier:
        assert tier.put(chunk)
        assert found_by(tier, moved(text(1)[40:87])) == [chunk.key]


def test_texts_without_marks_are_not_asked_for(server) -> None:
    with opened(server.url) as tier:
        server.client.config_resetstat()
        assert tier.find(ROOT, [text(1, 31)]) == tier.find(ROOT, []) == []
        assert tier.find_around(ROOT, [], []) == []
        assert "cmdstat_evalsha" not in server.client.info("commandstats")
        assert tier.stats().searches == 0


def test_roots_and_secrets_are_kept_apart(server) -> None:
    """One model and one salt have one root."""
    ours, theirs = Secret("a secret of ours"), Secret("a secret of theirs")
    ids = text(1)
    key = chain_key(ROOT, ids, secret=ours.naming)
    signed = make_chunk(ids, key=key)
    signed = KVChunk(replace(signed.info, signed=True), signed.data)
    with opened(server.url, secret=ours) as tier, opened(server.url, secret=ours) as again:
        assert tier.put(signed)
        assert found_by(again, moved(ids)) == [key]
        assert found_by(again, moved(ids), root_key("model", "tenant")) == []
    for secret in (theirs, None):
        with opened(server.url, secret=secret) as tier:
            assert found_by(tier, moved(ids)) == []
            assert tier.faults == {}


def test_names_of_marks_cannot_be_computed_without_the_secret(server) -> None:
    secret = Secret("a secret of ours")
    ids = text(1)
    with opened(server.url, secret=secret) as tier:
        assert tier.put(make_chunk(ids, key=chain_key(ROOT, ids, secret=secret.naming)))
    assert marks_in(server)
    assert not {name.decode() for name in marks_in(server)} & set(names(ids))


@pytest.mark.parametrize("way", ["deleted", "evicted", "damaged"])
def test_marks_leave_with_their_chunk(server, way: str) -> None:
    chunk, other = make_chunk(text(1)), make_chunk(text(2))
    with opened(server.url) as probe:
        budget = counted_size(probe, chunk) + counted_size(probe, other) - 1
    with opened(server.url, max_bytes=PLENTY if way != "evicted" else budget) as tier:
        assert tier.put(chunk)
        assert {name.decode() for name in marks_in(server)} == set(names(text(1)))
        if way == "deleted":
            tier.delete(chunk.key)
        elif way == "evicted":
            assert tier.put(other)
            assert not set(names(text(1))) & {name.decode() for name in marks_in(server)}
            tier.delete(other.key)
        else:
            server.client.hset(f"kvboost:1:chunk:{chunk.key}", "0", b"damaged")
            assert tier.get(chunk.key) is None
        assert tier.keys() == [] and marks_in(server) == []
        assert tier.nbytes == 0


def test_chunks_that_share_a_mark_leave_one_by_one(server) -> None:
    first = make_chunk(text(1))
    second = make_chunk(text(1), parent=text_key(7), position=50)
    with opened(server.url) as tier:
        assert tier.put(first) and tier.put(second)
        assert found_by(tier, text(1)) == [second.key, first.key]
        tier.delete(second.key)
        assert found_by(tier, text(1)) == [first.key]
        tier.delete(first.key)
        assert marks_in(server) == []


def text_key(seed: int) -> ChunkKey:
    return chain_key(ROOT, text(seed))


def test_of_many_chunks_with_a_mark_the_newest_few_are_found_exact_ones_first(server) -> None:
    ids = text(1)
    exact = [make_chunk(ids, parent=text_key(seed), position=9) for seed in range(10, 16)]
    before = text_key(30)
    approximate = [
        make_chunk(
            ids,
            parent=branch_key(before, repair),
            before=before,
            position=9,
            lineage=Lineage.APPROXIMATE,
        )
        for repair in ("one", "two")
    ]
    with opened(server.url) as tier:
        assert tier.put(approximate[0])
        assert all(tier.put(chunk) for chunk in exact[:2])
        assert tier.put(approximate[1])
        expected = [exact[1], exact[0], *approximate]
        assert found_by(tier, ids) == [chunk.key for chunk in expected]
        assert all(tier.put(chunk) for chunk in exact[2:])
        assert found_by(tier, ids) == [chunk.key for chunk in exact[:1:-1]]
        assert {server.client.strlen(name) for name in names(ids)} == {4 * 32}


def test_marks_count_with_more_than_the_server_needs_for_them(server) -> None:
    chunks = [make_chunk(text(1), parent=text_key(seed), position=9) for seed in range(10, 14)]
    chunks += [make_chunk(text(seed)) for seed in range(5)]
    with opened(server.url) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        assert tier.nbytes == sum(counted_size(tier, chunk) for chunk in chunks)
        counted = tier.nbytes - sum(map(size_of, chunks))
    used = [int(server.client.memory_usage(name)) for name in marks_in(server)]  # type: ignore[arg-type]
    assert len(used) > 50
    assert max(used) < MARK_BYTES
    assert counted >= sum(used) + 32 * len(used)  # and their names in the chunks


def test_the_budget_includes_marks_at_every_moment(server) -> None:
    """Four writers of chunks that are mostly marks."""
    made = [
        [make_chunk(text(100 * writer + n), data=flat(128)) for n in range(8)]
        for writer in range(4)
    ]
    with opened(server.url) as probe:
        budget = 5 * counted_size(probe, made[0][0])
    with contextlib.ExitStack() as stack:
        tiers = [stack.enter_context(opened(server.url, max_bytes=budget)) for _ in made]

        def write(writer: int) -> None:
            for chunk in made[writer]:
                tiers[writer].put(chunk)

        for _ in while_writing(write):
            assert tiers[0].nbytes <= budget
        assert all(tier.faults == {} for tier in tiers)
        there = set(tiers[0].keys())
        kept = [chunk for some in made for chunk in some if chunk.key in there]
        assert 3 <= len(kept) <= 5
        expected = {name for chunk in kept for name in names(chunk.info.token_ids)}
        assert {name.decode() for name in marks_in(server)} == expected


def flat(num_tokens: int) -> Any:
    return plain(torch.zeros(2, 1, 1, num_tokens, 1))


def test_marks_of_chunks_that_the_server_evicted_are_dropped_when_met(server) -> None:
    chunk, other = make_chunk(text(1)), make_chunk(text(1), parent=text_key(7), position=50)
    with opened(server.url) as tier:
        assert tier.put(other) and tier.put(chunk)
        server.client.delete(f"kvboost:1:chunk:{chunk.key}")
        assert found_by(tier, text(1)) == [other.key]
        server.client.delete(f"kvboost:1:chunk:{other.key}")
        assert found_by(tier, text(1)) == []
        assert not {name.decode() for name in marks_in(server)} & set(names(text(1)))
        assert tier.faults == {}


def test_marks_expire_unless_their_chunk_is_used(server) -> None:
    chunk = make_chunk(text(1))
    with opened(server.url) as tier:
        assert tier.put(chunk)
        assert all(0 < server.client.ttl(name) <= MARK_SECONDS for name in marks_in(server))
        for name in marks_in(server):
            server.client.expire(name, 5)
        assert tier.get(chunk.key) is not None
        assert all(server.client.ttl(name) > 5 for name in marks_in(server))


def test_a_folder_has_no_index(tmp_path) -> None:
    chunk = make_chunk(text(1))
    with opened(str(tmp_path / "shared")) as tier:
        assert tier.put(chunk) and not tier.has_index
        assert found_by(tier, text(1)) == []
        assert_same(tier.get(chunk.key), chunk)


def test_short_neighbours_are_found_around_a_chunk(server) -> None:
    first = make_chunk(text(1, 20))
    second = make_chunk(text(2), parent=first.key, position=20)
    third = make_chunk(text(3, 10), parent=second.key, position=148)
    with opened(server.url) as tier:
        assert tier.put(first) and tier.put(second) and tier.put(third)
        assert found_by(tier, text(2)) == [second.key]
        around = tier.find_around(ROOT, [first.key, text_key(9)], [second.key])
        assert [info.key for info in around] == [first.key, third.key]
        assert tier.find_around(root_key("model", "tenant"), [first.key], [second.key]) == []


def test_questions_and_answers_have_bounds(server) -> None:
    chunks = [make_chunk(text(seed, 64), data=flat(64)) for seed in range(300)]
    with opened(server.url) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        asked: list[int] = []
        backend = tier.backend
        assert isinstance(backend, RedisBackend)
        run = backend.run

        def listen(*args: Any) -> Any:
            asked.append(len(args[-1]) // 16)
            return run(*args)

        backend.run = listen  # type: ignore[method-assign]
        everything = as_token_ids(np.concatenate([chunk.info.token_ids for chunk in chunks]))
        assert len(names(everything)) > 1024
        assert 200 < len(found_by(tier, everything)) <= 256
        assert asked == [1024]


def test_long_headers_are_not_read_beyond_a_limit(server) -> None:
    chunks = [make_chunk(text(seed)) for seed in range(3)]
    with opened(server.url) as tier:
        assert all(tier.put(chunk) for chunk in chunks)
        server.client.hset(f"kvboost:1:chunk:{chunks[1].key}", "header", b"x" * (9 << 20))
        everything = as_token_ids(np.concatenate([chunk.info.token_ids for chunk in chunks]))
        assert found_by(tier, everything) == [chunks[0].key, chunks[2].key]
        assert tier.faults == {}


POISONS: dict[str, str | None] = {
    "garbage": "no keys at all, but 32 characters" * 3,
    "half a key": "ab" * 8,
    "a list": None,
    "many megabytes": "ab" * (4 << 20),
    "unknown chunks": "0123456789abcdef" * 8,
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_poisoned_marks_find_nothing_and_are_replaced(server, poison: str | None) -> None:
    chunk = make_chunk(text(1))
    with opened(server.url) as tier:
        assert tier.put(chunk)
        for name in names(text(1)):
            server.client.delete(name)
            if poison is None:
                server.client.rpush(name, "x")
            else:
                server.client.set(name, poison)
        assert found_by(tier, text(1)) == []
        assert tier.faults == {} and tier.state == "closed"
        tier.delete(chunk.key)
        assert tier.put(chunk)
        assert found_by(tier, text(1)) == [chunk.key]


def test_marks_that_point_to_other_chunks_do_not_cross_roots(server) -> None:
    theirs = root_key("model", "tenant")
    chunk = make_chunk(text(2), parent=theirs, root=theirs)
    with opened(server.url) as tier:
        assert tier.put(chunk)
        for name in names(text(1)):
            server.client.set(name, chunk.key)
        assert found_by(tier, text(1)) == []
        assert tier.stats().found == 0


def test_marks_that_point_to_damaged_headers_are_faults(server) -> None:
    chunk, other = make_chunk(text(1)), make_chunk(text(2))
    with opened(server.url) as tier:
        assert tier.put(chunk) and tier.put(other)
        header = server.client.hget(f"kvboost:1:chunk:{other.key}", "header")
        server.client.hset(f"kvboost:1:chunk:{chunk.key}", "header", header)
        assert found_by(tier, text(1)) == []
        assert tier.faults == {"corrupt": 1}


def test_a_hundred_thousand_foreign_marks_change_nothing(server) -> None:
    chunk = make_chunk(text(1))
    flood = "for i = 1, 100000 do redis.call('SET', ARGV[1] .. i, i) end"
    with opened(server.url) as tier:
        assert tier.put(chunk)
        server.client.eval(flood, 0, MARK)
        assert found_by(tier, moved(text(1))) == [chunk.key]
        tier.delete(chunk.key)
        assert server.client.dbsize() == 100_000 + 1  # and the accounts


def test_a_chunk_with_poisoned_names_of_marks_can_be_deleted(server) -> None:
    chunk = make_chunk(text(1))
    for names_of_marks in (b"x" * (1 << 20), b"odd", b"\xff" * 64):
        with opened(server.url) as tier:
            assert tier.put(chunk)
            server.client.hset(f"kvboost:1:chunk:{chunk.key}", "marks", names_of_marks)
            assert_same(tier.get(chunk.key), chunk)
            tier.delete(chunk.key)
            assert tier.keys() == [] and tier.nbytes == 0 and tier.faults == {}


def test_a_full_server_still_answers_and_deletes(server) -> None:
    shared = make_chunk(text(1), parent=text_key(7), position=50)
    chunk = make_chunk(text(1))
    with opened(server.url) as tier:
        assert tier.put(shared) and tier.put(chunk)
        server.client.config_set("maxmemory", 1 << 20)
        assert found_by(tier, text(1)) == [chunk.key, shared.key]
        tier.delete(chunk.key)
        assert found_by(tier, text(1)) == [shared.key]
        assert tier.faults == {}


def test_a_server_that_is_gone_is_a_miss(own_server) -> None:
    with opened(own_server.url) as tier:
        assert tier.put(make_chunk(text(1)))
        own_server.stop()
        assert [found_by(tier, text(1)) for _ in range(5)] == [[]] * 5
        assert tier.faults == {"unreachable": 3} and tier.state == "open"
        assert tier.stats().searches == 3
        assert tier.find_around(ROOT, [text_key(1)], []) == []


def test_marks_are_written_even_if_the_server_forgot_the_script(server) -> None:
    chunk = make_chunk(text(1))
    with opened(server.url) as tier:
        assert tier.put(make_chunk(text(2)))
        server.client.script_flush()
        assert found_by(tier, text(2)) != []
        assert server.client.script_exists(server.client.script_load(SCRIPT)) == [True]
        assert tier.put(chunk) and found_by(tier, text(1)) == [chunk.key]
