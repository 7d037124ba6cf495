"""Text that only another machine has read, found in Redis at any position of a prompt."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import ForgetError, GenerationMode, KVBoost, SpanKind
from kvboost.cache.store import ChunkLost, ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.remote.tier import open_remote
from kvboost.tokens.hashing import as_token_ids
from kvboost.tokens.marks import SHARED
from support.chunks import ROOT, chunk_store, packing
from support.redis_server import RedisServer
from support.tiny import make_engine, tiny_model

Open = Callable[..., KVBoost]

MARK = "kvboost:1:mark:"
SECRET = "a secret of ours"


def letters(seed: int, count: int) -> str:
    """A token each."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=count))


PASSAGE = letters(1, 150)
READ = "A page. " + PASSAGE
ASKED = "Quite another beginning of this prompt: " + PASSAGE + " And what do we ask?"


@pytest.fixture
def open_engine(server: RedisServer) -> Iterator[Open]:
    """Engines that share nothing but a Redis server; moved text is reused as it is."""
    with contextlib.ExitStack() as stack:

        def open_engine(**options: Any) -> KVBoost:
            config = {
                "chunk_size": 64,
                "gpu_cache_bytes": 0,
                "remote_cache_url": server.url,
                "reuse_moved": "always",
                "recompute_strategy": "none",
                **options,
            }
            return stack.enter_context(make_engine(tiny_model("llama"), **config))

        yield open_engine


def read_once(open_engine: Open, text: str = READ, salt: str = "", **options: Any) -> None:
    with open_engine(**options) as engine:
        engine.generate(text, 1, cache_salt=salt)


def remote(engine: KVBoost) -> dict[str, Any]:
    stats: dict[str, Any] = engine.cache_stats()["tiers"]["remote"]
    return stats


def moved_tiers(result: Any) -> set[str | None]:
    return {span.tier for span in result.spans if span.kind is SpanKind.MOVED}


def known_chunks(engine: KVBoost) -> int:
    return len(engine.runtime.store.holdings.catalogue)


def marks_in(server: RedisServer) -> list[bytes]:
    return server.client.keys(f"{MARK}*")  # type: ignore[return-value]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_fresh_engine_reuses_moved_text_that_another_has_read(open_engine, secret) -> None:
    with open_engine(remote_cache_url=None) as one:
        one.generate(READ, 1)
        expected = one.generate(ASKED, 8)
        assert moved_tiers(expected) == {"ram"}
    read_once(open_engine, cache_secret=secret)
    fresh = open_engine(cache_secret=secret)
    result = fresh.generate(ASKED, 8)
    assert result.moved_tokens == expected.moved_tokens > 130
    assert moved_tiers(result) == {"remote"}
    assert result.token_ids == expected.token_ids
    stats = remote(fresh)
    assert stats["searches"] == 1 and stats["found"] >= 3 and stats["hits"] >= 3
    assert stats["faults"] == {} and fresh.check_integrity() == []
    again = fresh.generate(PASSAGE + " Once more, in memory.", 2)
    assert moved_tiers(again) == {"ram"}


@pytest.mark.parametrize("strategy", ["none", "auto"])
def test_rows_from_another_machine_give_the_logits_of_rows_in_memory(open_engine, strategy) -> None:
    options = {"recompute_strategy": strategy}
    with open_engine(**options, remote_cache_url=None) as one:
        one.generate(READ, 1)
        expected = one.score(ASKED, [1, 2, 3])
    read_once(open_engine, **options)
    scored = open_engine(**options).score(ASKED, [1, 2, 3])
    assert {span.tier for span in scored.reuse.spans} == {"remote", None}
    assert scored.reuse.count(SpanKind.MOVED) == expected.reuse.count(SpanKind.MOVED) > 130
    assert torch.equal(scored.logits, expected.logits)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_salt": "theirs"},
        {"cache_secret": "a secret of theirs"},
        {"cache_secret": None},
        {"kv_cache_bits": 8},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_salt_secret_or_precision_finds_nothing(open_engine, server, options) -> None:
    read_once(open_engine, cache_secret=SECRET)
    assert marks_in(server)
    salt = options.pop("cache_salt", "")
    engine = open_engine(**{"cache_secret": SECRET, **options})
    result = engine.generate(ASKED, 8, cache_salt=salt)
    assert result.cached_tokens == 0
    assert remote(engine)["searches"] == 1 and remote(engine)["found"] == 0


def test_the_remote_store_is_asked_only_when_that_can_help(open_engine) -> None:
    read_once(open_engine)
    engine = open_engine()
    engine.generate(ASKED, 1, GenerationMode.PREFIX_CACHE)
    engine.generate(ASKED, 1, GenerationMode.BASELINE)
    engine.generate("Too short for a mark.", 1)
    assert remote(engine)["searches"] == 0
    engine.generate(READ, 1)  # exact hits
    assert remote(engine)["searches"] == 0 and remote(engine)["hits"] >= 2
    engine.generate(PASSAGE + "?", 1)  # in memory by now
    assert remote(engine)["searches"] == 0
    store = engine.runtime.store
    ids = engine.encode(letters(2, 100))
    with store.lookup(
        engine.runtime.root(""), as_token_ids(ids), moved_before=100, ask_remote=False
    ):
        assert remote(engine)["searches"] == 0


def test_what_is_found_and_not_fetched_is_dropped(open_engine) -> None:
    read_once(open_engine)
    engine = open_engine()
    report = engine.plan(ASKED)
    assert {span.tier for span in report.spans} == {"remote", None}
    assert known_chunks(engine) == 0 and engine.check_integrity() == []
    assert remote(engine)["found"] >= 3 and remote(engine)["hits"] == 0


def test_chunks_too_short_for_a_mark_are_found_beside_others(open_engine) -> None:
    """The passage begins with the last 20 tokens of one chunk and ends with the first 20 of
    another."""
    read = PASSAGE[:148]
    read_once(open_engine, read)
    engine = open_engine()
    result = engine.generate("A beginning: " + read[44:] + " Then there is a question.", 2)
    assert result.moved_tokens == 20 + 64 + 20
    assert remote(engine)["searches"] == 1 and remote(engine)["hits"] == 3


def test_chunks_of_the_prefix_and_of_moved_text_come_together(open_engine) -> None:
    other = letters(3, 64)
    read_once(open_engine, READ)
    read_once(open_engine, other + " to be continued")
    engine = open_engine()
    result = engine.generate(other + PASSAGE[:100] + " so what is it, then?", 2)
    assert result.exact_tokens == 64 and result.moved_tokens >= 90
    assert {span.tier for span in result.spans} == {"remote", None}


@pytest.mark.parametrize("how", ["forget", "forget_text"])
def test_forgetting_leaves_no_marks(open_engine, server, how: str) -> None:
    read_once(open_engine)
    assert marks_in(server)
    engine = open_engine()
    if how == "forget":
        assert engine.runtime.store.forget(engine.runtime.root("")) >= 3
    else:
        assert engine.forget(PASSAGE) >= 3
    assert marks_in(server) == []
    assert set(server.client.keys("*")) <= {b"kvboost:1:accounts"}
    assert open_engine().generate(ASKED, 1).cached_tokens == 0


def test_forgetting_another_text_leaves_moved_text_in_the_remote_store(open_engine, server) -> None:
    """Its beginning is there, though it is not on this machine."""
    read_once(open_engine, PASSAGE[:64] + PASSAGE)
    engine = open_engine()
    assert moved_tiers(engine.generate("Else: " + PASSAGE[10:] + " And then we ask?", 1))
    before = set(server.client.keys("kvboost:1:chunk:*"))
    engine.forget(letters(5, 80))
    assert before and set(server.client.keys("kvboost:1:chunk:*")) >= before


@pytest.mark.parametrize("kind", ["other text", "other tenant", "other model", "garbage"])
def test_poisoned_marks_never_change_an_answer(open_engine, server, kind: str) -> None:
    expected = open_engine().generate(ASKED, 8, GenerationMode.BASELINE).token_ids
    other = letters(4, 128)
    if kind == "other model":
        with make_engine(tiny_model("qwen2"), chunk_size=64, remote_cache_url=server.url) as engine:
            engine.generate(READ, 1)
    else:
        read_once(open_engine, other, salt="tenant" if kind == "other tenant" else "")
    keys = [name.decode()[-32:] for name in server.client.keys("kvboost:1:chunk:*")]
    read_once(open_engine)
    planted = "z" * 128 if kind == "garbage" else "".join(keys)[:128]
    for name in marks_in(server):
        server.client.set(name, planted)
    engine = open_engine()
    result = engine.generate(ASKED, 8)
    assert result.cached_tokens == 0 and result.token_ids == expected
    assert remote(engine)["searches"] == 1 and remote(engine)["hits"] == 0
    assert known_chunks(engine) == integrity_chunks(engine)


def integrity_chunks(engine: KVBoost) -> int:
    """Chunks in memory, after a check of the books."""
    assert engine.check_integrity() == []
    return int(engine.cache_stats()["tiers"]["ram"]["chunks"])


def test_a_found_chunk_whose_data_are_damaged_is_computed(open_engine, server) -> None:
    expected = open_engine().generate(ASKED, 8, GenerationMode.BASELINE).token_ids
    read_once(open_engine)
    for name in server.client.keys("kvboost:1:chunk:*"):
        piece = bytearray(server.client.hget(name, "0"))
        piece[100] ^= 1
        server.client.hset(name, "0", bytes(piece))
    engine = open_engine()
    result = engine.generate(ASKED, 8)
    assert result.cached_tokens == 0 and result.token_ids == expected
    assert remote(engine)["found"] >= 3 and remote(engine)["faults"]["corrupt"] >= 1


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_server_that_dies_costs_time_and_nothing_else(
    when: str, own_server: RedisServer, open_engine
) -> None:
    url = {"remote_cache_url": own_server.url}
    expected = open_engine(**url).generate(ASKED, 8, GenerationMode.BASELINE).token_ids
    read_once(open_engine, **url)
    engine = open_engine(**url)
    tier = engine.runtime.store.transfers.remote
    assert tier is not None
    find, around = tier.find, tier.find_around

    def find_and_die(*args: Any) -> Any:
        found = find(*args)
        assert found
        if when == "between":
            own_server.stop()
        return found

    def around_and_die(*args: Any) -> Any:
        found = around(*args)
        own_server.stop()
        return found

    tier.find, tier.find_around = find_and_die, around_and_die  # type: ignore[method-assign]
    if when == "before":
        tier.find = find  # type: ignore[method-assign]
        own_server.stop()
    result = engine.generate(ASKED, 8)
    assert result.cached_tokens == 0 and result.token_ids == expected
    assert remote(engine)["faults"]["unreachable"] >= 1
    assert engine.check_integrity() == []


def test_forgetting_without_the_server_says_that_something_may_be_left(
    own_server: RedisServer, open_engine
) -> None:
    url = {"remote_cache_url": own_server.url}
    engine = open_engine(**url)
    engine.generate(READ, 1)
    engine.flush()
    own_server.stop()
    with pytest.raises(ForgetError, match=r"[1-9] in remote may be left"):
        engine.forget(PASSAGE)
    with pytest.raises(ForgetError, match=r"0 chunks are forgotten.* does not answer"):
        engine.forget(PASSAGE)  # nothing is known here any more


def test_stores_without_marks_serve_exact_hits(open_engine, server) -> None:
    """As earlier versions filled them."""
    read_once(open_engine)
    server.client.delete(*marks_in(server))
    for name in server.client.keys("kvboost:1:chunk:*"):
        server.client.hdel(name, "marks")
    engine = open_engine()
    assert engine.generate(ASKED, 1).cached_tokens == 0
    result = engine.generate(READ, 1)
    assert result.exact_tokens == 128
    assert {span.tier for span in result.spans} == {"remote", None}


def test_a_folder_serves_exact_hits_only(open_engine, tmp_path) -> None:
    options = {"remote_cache_url": str(tmp_path / "shared"), "remote_cache_bytes": 10**9}
    read_once(open_engine, **options)
    engine = open_engine(**options)
    assert engine.generate(ASKED, 1).cached_tokens == 0
    assert remote(engine)["searches"] == 0
    assert engine.generate(READ, 1).exact_tokens == 128


def test_a_search_is_one_round_trip_when_nothing_is_found(open_engine, server) -> None:
    engine = open_engine()
    store, root = engine.runtime.store, engine.runtime.root("")
    ids = as_token_ids(np.random.default_rng(0).integers(0, 250, 200))
    with store.lookup(root, ids, moved_before=180):
        pass  # the server has the script now
    server.client.config_resetstat()
    with store.lookup(root, ids, moved_before=180) as known:
        assert known.moved == ()
    calls = server.client.info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] == 2  # the chunks of the prefix, and the marks


def test_many_requests_at_once_leave_the_books_in_order(open_engine) -> None:
    pages = [letters(seed, 128) for seed in range(10, 14)]
    for page in pages:
        read_once(open_engine, page)
    engine = open_engine(max_cache_bytes=10 * 2 * 3 * 2 * 64 * 16 * 4)  # ten chunks
    store, root = engine.runtime.store, engine.runtime.root("")
    prompts = [
        as_token_ids(engine.encode(letters(20 + seed, 9) + pages[seed % 4] + pages[seed % 3]))
        for seed in range(24)
    ]
    reused: list[int] = []

    def look(first: int) -> None:
        for ids in prompts[first::4]:
            with store.lookup(root, ids, moved_before=len(ids)) as known:
                hits = [hit for run in known.moved for hit in run.hits]
                with contextlib.suppress(ChunkLost):
                    reused.append(len(list(store.fetch(hits))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    assert sum(reused) > 0 and remote(engine)["hits"] > 0
    assert remote(engine)["faults"] == {}
    assert known_chunks(engine) == integrity_chunks(engine) <= 10


def small_store(server: RedisServer) -> contextlib.closing[ChunkStore]:
    tiers = Tiers(RamTier(1 << 24), remote=open_remote(server.url, None))
    return contextlib.closing(chunk_store(tiers, 128))


def test_a_fresh_store_finds_every_passage_that_its_owner_finds(server) -> None:
    """Texts of random passages, some of them seen before, in random places. A run that shares
    ``SHARED`` tokens with one of its chunks must be found, from its first row to its last."""
    draw = np.random.default_rng(3)
    seen = [draw.integers(0, 999, 700) for _ in range(6)]
    checked = 0
    with small_store(server) as owner:
        for text in seen:
            rows = packing(torch.zeros(2, 1, 1, len(text), 2))
            owner.admit(ROOT, as_token_ids(text), rows, exact_rows=sys.maxsize)
        owner.flush()
        for _ in range(25):
            pieces = []
            for _ in range(5):
                start, length = draw.integers(0, 600), draw.integers(5, 300)
                pieces.append(seen[draw.integers(6)][start : start + length])
                pieces.append(draw.integers(0, 999, draw.integers(1, 60)))
            ids = as_token_ids(np.concatenate(pieces))
            with owner.lookup(ROOT, ids, moved_before=len(ids), ask_remote=False) as known:
                expected = [
                    run.hits
                    for run in known.moved
                    if max(hit.num_tokens for hit in run.hits) >= SHARED
                ]
            with small_store(server) as fresh:
                with fresh.lookup(ROOT, ids, moved_before=len(ids)) as known:
                    found = {hit.start for run in known.moved for hit in run.hits}
                    covered = {row for r in known.moved for row in range(r.start, r.end)}
                assert fresh.stats().chunks == 0
            for hits in expected:
                assert covered >= set(range(hits[0].start, hits[-1].end))
                assert hits[0].start in found
                checked += 1
    assert checked > 60
