"""Commands with a real planner and the tiers of real workers, without vLLM between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.data import ChunkData
from kvboost.cache.quantize import plain
from kvboost.cache.tiers.open import open_tiers
from kvboost.config import EngineConfig
from kvboost.integrations.vllm.commands import (
    CLOSED,
    MOST_PENDING,
    TOO_MANY,
    Commands,
    Order,
    Reply,
)
from kvboost.integrations.vllm.options import Command, Options, RequestOptions
from kvboost.integrations.vllm.planner import Hello, Planner, prompt_ids
from kvboost.integrations.vllm.tally import Tally
from kvboost.tokens.hashing import TokenIds
from support.planting import OTHER_VERSIONS, chunk_files, plant
from support.redis_server import RedisServer, started_redis

ASKED = RequestOptions("repaired", 0.15)
STATS, EVERYTHING = Command("stats"), Command("forget")


class Cache:
    """A scheduler's side and one worker's."""

    def __init__(self, **extra: Any) -> None:
        self.planner = Planner(Options.parse({"chunk_size": 32, **extra}), page=32)
        self.planner.open([Hello("weights", "a model", row_bytes=8)])
        self.commands = Commands(self.planner, Tally())
        self.commands.open(1)
        self.data = ChunkData(open_tiers(EngineConfig(**extra), torch.device("cpu")))

    def read(self, ids: TokenIds, salt: str = "") -> int:
        assert self.planner.index is not None
        root = self.planner.root(salt)
        infos, _ = self.planner.index.store(root, ids)
        empty = [plain(torch.zeros(2, 1, 1, info.num_tokens, 1)) for info in infos]
        self.data.put([KVChunk(info, kv) for info, kv in zip(infos, empty, strict=True)])
        self.data.flush()
        return len(infos)

    def ask(self, command: Command, salt: str = "") -> dict[str, Any]:
        self.commands.begin("asked", command, salt)
        while self.commands.waits("asked"):
            for order in self.commands.take_orders():
                self.commands.hear({order.request_id: [order.obey(self.data)]})
        answer = self.commands.take_answer("asked")
        assert answer is not None
        assert self.commands.take_answer("asked") is None
        return answer

    def close(self) -> None:
        self.commands.close()
        self.planner.close()
        self.data.close()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from started_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Cache] = []

    def start(**extra: Any) -> Cache:
        started.append(Cache(**extra))
        return started[-1]

    yield start
    for cache in started:
        cache.close()


def text(seed: int, length: int = 200) -> TokenIds:
    return prompt_ids(np.random.default_rng(seed).integers(0, 10_000, length).tolist())


def forget(*texts: TokenIds) -> Command:
    return Command("forget", tuple(tuple(ids.tolist()) for ids in texts))


def test_stats_say_what_is_held(start: Any) -> None:
    cache = start()
    cache.read(text(1))
    cache.read(text(2, 64), salt="mine")
    stats = cache.ask(STATS, salt="mine")["stats"]
    assert (stats["chunks"], stats["chunks_of_salt"]) == (9, 2)
    ram = stats["tiers"]["ram"]
    assert ram["chunks"] == 9 and ram["bytes"] == 264 * 8 and ram["faults"] == {}
    assert stats["loads"] == {"loaded": 0, "failed": 0}


def test_a_text_is_forgotten_in_memory_on_disk_and_in_redis(
    start: Any, tmp_path: Path, redis: RedisServer
) -> None:
    cache = start(disk_cache_dir=tmp_path, remote_cache_url=redis.url)
    assert cache.read(text(1)) == 7 and cache.read(text(2)) == 7
    assert len(list(chunk_files(tmp_path))) == 14
    remote = cache.planner.remote
    assert remote is not None and len(remote.keys()) == 14
    assert cache.ask(forget(text(1)[10:60])) == {"forgotten": 7}
    stats = cache.ask(STATS)["stats"]
    assert {name: tier.get("chunks") for name, tier in stats["tiers"].items()} == {
        "ram": 7,
        "disk": 7,
        "remote": None,
    }
    assert len(remote.keys()) == 7 and len(list(chunk_files(tmp_path))) == 7
    assert cache.planner.plan("next", text(1), 0, "", ASKED) is None
    assert cache.planner.plan("next", text(2), 0, "", ASKED) is not None
    assert cache.ask(EVERYTHING) == {"forgotten": 7}
    assert remote.keys() == [] and not list(chunk_files(tmp_path))


def test_what_only_redis_holds_is_forgotten(start: Any, redis: RedisServer) -> None:
    first = start(remote_cache_url=redis.url)
    first.read(text(3))
    second = start(remote_cache_url=redis.url)
    assert second.planner.num_chunks() == 0
    assert second.ask(forget(text(3)[100:140])) == {"forgotten": 4}
    assert len(second.planner.remote.keys()) == 3
    assert second.ask(EVERYTHING) == {"forgotten": 3}


def test_other_salts_are_left_alone(start: Any) -> None:
    cache, ids = start(), text(1)
    for salt in ("", "mine", "theirs"):
        cache.read(ids, salt)
    assert [cache.ask(forget(ids), salt="mine")["forgotten"] for _ in range(2)] == [7, 0]
    assert cache.ask(EVERYTHING, salt="nobody's") == {"forgotten": 0}
    assert [cache.planner.num_chunks(salt) for salt in ("", "mine", "theirs")] == [7, 0, 7]
    assert cache.ask(STATS)["stats"]["tiers"]["ram"]["chunks"] == 14


def test_a_remote_store_that_is_down_is_named(start: Any) -> None:
    cache = start(remote_cache_url="redis://127.0.0.1:1")
    cache.read(text(1))
    answer = cache.ask(EVERYTHING)
    assert answer["forgotten"] == 7 and "7 in remote may be left" in answer["error"]
    assert cache.planner.num_chunks() == 0
    answer = cache.ask(EVERYTHING)
    assert answer["forgotten"] == 0 and "does not answer" in answer["error"]


def test_chunks_of_another_version_in_the_remote_store_are_named(
    start: Any, tmp_path: Path
) -> None:
    """The store answers, and all that can be searched is forgotten: only they are left."""
    remote = {"remote_cache_url": f"file://{tmp_path}", "remote_cache_bytes": 1 << 24}
    start(**remote).read(text(1))
    plant(chunk_files(tmp_path)[0], **OTHER_VERSIONS["a newer format"])
    cache = start(**remote)
    for found in (6, 0):
        answer = cache.ask(EVERYTHING)
        assert answer["forgotten"] == found
        assert "others may be left: 1 in remote cannot be searched" in answer["error"]
    assert len(chunk_files(tmp_path)) == 1
    cache.planner.remote.delete(chunk_files(tmp_path)[0].stem)
    assert cache.ask(EVERYTHING) == {"forgotten": 0}


def test_all_workers_must_reply() -> None:
    planner = Planner(Options.parse({}), page=32)
    planner.open([Hello("weights", "a model", row_bytes=8)] * 2)
    commands = Commands(planner, Tally())
    commands.open(2)
    commands.begin("asked", STATS, "")
    assert commands.take_orders() == [Order("asked")] and commands.take_orders() == []
    of_worker = {"ram": {"chunks": 2, "bytes": 10, "max_bytes": 99, "hits": 1, "faults": {"x": 1}}}
    commands.hear({"asked": [Reply(of_worker)], "gone": [Reply()]})
    assert commands.waits("asked")
    commands.hear({"asked": [Reply(of_worker)]})
    assert not commands.waits("asked")
    answer = commands.take_answer("asked")
    assert answer is not None and answer["stats"]["tiers"]["ram"] == {
        "chunks": 2,
        "bytes": 20,
        "max_bytes": 198,
        "hits": 2,
        "faults": {"x": 2},
    }
    commands.close()


def test_a_client_that_goes_leaves_nothing(start: Any) -> None:
    cache = start()
    cache.commands.begin("asked", STATS, "")
    assert cache.commands.waits("asked")
    assert cache.commands.take_answer("asked") is None
    assert not cache.commands.waits("asked")
    cache.commands.hear({"asked": [Reply()]})
    assert cache.commands.take_answer("asked") is None


def test_forgetting_is_known_while_it_lasts(start: Any) -> None:
    cache = start()
    cache.commands.begin("asked", EVERYTHING, "mine")
    assert cache.commands.is_forgetting("mine") and not cache.commands.is_forgetting("")
    cache.commands.take_answer("asked")
    assert not cache.commands.is_forgetting("mine")


def test_where_nothing_is_reused_the_answer_says_so() -> None:
    commands = Commands(Planner(Options.parse({}), page=32), Tally())
    commands.begin("asked", STATS, "")
    assert not commands.waits("asked")
    assert commands.take_answer("asked") == {"error": CLOSED}
    commands.close()


def test_what_goes_wrong_is_an_answer(start: Any) -> None:
    """Clients need not know paths, or what the planner says."""

    def broken(keys: object) -> dict[str, int]:
        raise OSError(5, "the disk is on fire", "/home/ann/kv")

    def search(salt: str, texts: object) -> Any:
        def broken() -> None:
            raise ValueError("a secret of the planner")

        return broken

    cache = start()
    cache.data.purge = broken
    said = "OSError: the disk is on fire; vLLM's log says more"
    assert cache.ask(EVERYTHING) == {"error": said}
    cache.planner.search = search
    assert cache.ask(EVERYTHING) == {"error": "ValueError; vLLM's log says more"}


def test_the_number_of_commands_that_wait_is_limited(start: Any) -> None:
    """Each costs the scheduler time, and anyone may send them."""
    cache = start()
    cache.read(text(1))
    for number in range(MOST_PENDING):
        cache.commands.begin(f"waits {number}", EVERYTHING, "mine")
    cache.commands.begin("one too many", EVERYTHING, "theirs")
    assert not cache.commands.waits("one too many")
    assert cache.commands.take_answer("one too many") == {"error": TOO_MANY}
    for number in range(MOST_PENDING):  # their clients go
        assert cache.commands.take_answer(f"waits {number}") is None
    assert cache.ask(STATS)["stats"]["chunks"] == 7


def test_one_search_is_under_way_at_a_time(start: Any) -> None:
    cache, go_on = start(), threading.Event()
    search, began = cache.planner.search, []

    def slow(salt: str, texts: object) -> Any:
        found = search(salt, texts)
        began.append(salt)

        def wait() -> Any:
            assert go_on.wait(60)
            return found()

        return wait

    cache.planner.search = slow
    for salt in ("a", "b", "c"):
        cache.commands.begin(salt, EVERYTHING, salt)
    for _ in range(3):
        assert cache.commands.take_orders() == [] and began == ["a"]
    cache.commands.take_answer("b")  # its client goes, and nothing is searched for it
    go_on.set()
    while any(cache.commands.waits(salt) for salt in "ac"):
        for order in cache.commands.take_orders():
            cache.commands.hear({order.request_id: [order.obey(cache.data)]})
    assert began == ["a", "c"]
    assert cache.commands.take_answer("c") == {"forgotten": 0}
