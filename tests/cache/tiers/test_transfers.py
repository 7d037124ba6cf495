"""Several tiers under one store."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.chunk import Origin
from kvboost.cache.store import ChunkLost
from kvboost.cache.tiers import disk
from kvboost.cache.tiers import writer as writer_module
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.gpu import GpuTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.remote.tier import open_remote
from kvboost.cache.tiers.stats import RemoteStats
from kvboost.tokens.hashing import ChunkKey, as_token_ids, root_key
from support.chunks import ROOT, chunk_store
from support.tiered import CHUNK, CHUNK_BYTES, admit, files, hits, text


def bytes_in(folder: Path) -> int:
    """What chunks really take on disk, half-written ones included, while they come and go."""
    total = 0
    for path in [*files(folder), *folder.glob("tmp-*")]:
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_the_next_store_reads_from_disk_what_the_last_one_wrote(open_store) -> None:
    store = open_store()
    admit(store, text(1))
    assert hits(store, text(1)) == ["ram"] * 3
    store.close()
    again = open_store()
    assert hits(again, text(1)) == ["disk"] * 3
    assert hits(again, text(1)) == ["ram"] * 3  # a hit promotes
    stats = again.stats()
    assert stats.moves.promoted == 3 and stats.tiers["disk"].hits == 3
    assert again.check_integrity() == []


def test_pressure_demotes_to_disk_and_loses_nothing(open_store, tmp_path) -> None:
    store = open_store(ram=4)
    for seed in range(10):
        admit(store, text(seed))
    store.flush()
    stats = store.stats()
    assert stats.tiers["ram"].chunks <= 4 and stats.chunks == 30
    assert stats.moves.demoted >= 26 and stats.moves.evicted == 0
    assert len(files(tmp_path / "kv")) == 30
    for seed in range(10):
        assert len(hits(store, text(seed))) == 3
    assert store.check_integrity() == []


def test_a_full_disk_budget_evicts_children_before_parents(open_store, tmp_path) -> None:
    store = open_store(ram=3, disk=6)
    for seed in range(6):
        admit(store, text(seed))
        store.flush()
        assert store.stats().tiers["disk"].nbytes <= 6 * 4 * CHUNK_BYTES
    stats = store.stats()
    assert stats.moves.evicted > 0
    assert store.check_integrity() == []
    found = DiskTier(tmp_path / "kv", 10**6).refresh(now=True).added
    keys = {info.key for info in found}
    parents = {info.parent for info in found if info.base_position}
    assert keys and parents <= keys  # no child without its parent


def test_a_smaller_budget_holds_from_the_start(open_store) -> None:
    store = open_store()
    for seed in range(8):
        admit(store, text(seed))
    store.close()
    again = open_store(disk=5)
    assert 0 < again.stats().tiers["disk"].nbytes <= 5 * 4 * CHUNK_BYTES
    assert again.check_integrity() == []


def test_the_gpu_serves_first_and_falls_back(open_store) -> None:
    store = open_store(gpu=3, ram=6)
    admit(store, text(1))
    assert hits(store, text(1)) == ["gpu"] * 3
    admit(store, text(2))
    assert hits(store, text(2)) == ["gpu"] * 3
    assert hits(store, text(1)) == ["ram"] * 3
    assert hits(store, text(1)) == ["gpu"] * 3  # a hit promotes
    assert store.check_integrity() == []


def test_a_damaged_file_is_a_miss_and_the_chunks_after_it_serve_again(open_store, tmp_path):
    store = open_store()
    admit(store, text(1))
    store.close()
    again = open_store()
    with again.lookup(ROOT, as_token_ids(text(1))) as known:
        middle = known.exact[1].chunk.key
        path = tmp_path / "kv" / middle[:2] / f"{middle}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ChunkLost):
            list(again.fetch(known.exact))
    assert len(hits(again, text(1))) == 1
    stats = again.stats()
    assert (stats.moves.lost, stats.tiers["disk"].faults) == (1, {"corrupt": 1})
    assert admit(again, text(1)) == 1
    assert len(hits(again, text(1))) == 3
    assert again.stats().in_use == 0 and again.check_integrity() == []


def test_stores_share_a_folder_while_they_run(open_store, monkeypatch) -> None:
    monkeypatch.setattr(disk, "REFRESH_SECONDS", 0.0)
    one, two = open_store(), open_store()
    admit(one, text(1))
    one.flush()
    assert hits(two, text(1)) == ["disk"] * 3
    admit(two, [*text(1), *text(2)])
    two.flush()
    assert hits(one, [*text(1), *text(2)]) == ["ram"] * 3 + ["disk"] * 3


def test_models_share_a_folder_and_a_budget_but_no_chunks(open_store) -> None:
    one = open_store(disk=4)
    admit(one, text(1))
    one.close()
    other = Origin("another model")
    two = open_store(disk=4, origin=other)
    assert hits(two, text(1)) == []
    assert two.stats().tiers["disk"].chunks == 3
    for seed in range(4):
        admit(two, text(seed), root_key("another model", ""))
        two.flush()
        assert two.stats().tiers["disk"].nbytes <= 4 * 4 * CHUNK_BYTES
    assert two.check_integrity() == []


def test_salts_are_in_every_key_on_every_tier(open_store) -> None:
    ours, theirs = root_key("model", "ours"), root_key("model", "theirs")
    store = open_store()
    admit(store, text(1), ours)
    store.close()
    again = open_store()
    assert hits(again, text(1), theirs) == []
    assert hits(again, text(1), ours) == ["disk"] * 3


def test_a_pinned_text_stays_on_every_tier(open_store) -> None:
    store = open_store(ram=4, disk=4)
    admit(store, text(0))
    assert store.pin("it", ROOT, as_token_ids(text(0))).chunks == 3
    for seed in range(1, 8):
        admit(store, text(seed))
        store.flush()
    assert hits(store, text(0)) == ["ram"] * 3
    assert store.stats().pinned == 3
    assert store.unpin("it").chunks == 3
    assert store.unpin("it") is None
    for seed in range(8, 12):
        admit(store, text(seed))
        store.flush()
    assert hits(store, text(0)) == []


def test_another_machine_reads_from_the_remote_store(open_store, tmp_path) -> None:
    url = f"file://{tmp_path}/far"
    here = open_store(remote=open_remote(url, 10**9), folder="here")
    admit(here, text(1))
    here.flush()
    there = open_store(remote=open_remote(url, 10**9), folder="there")
    assert hits(there, text(1)) == ["remote"] * 3
    assert hits(there, text(1)) == ["ram"] * 3
    assert there.stats().tiers["ram"].nbytes == 3 * CHUNK_BYTES
    there.flush()
    assert len(files(tmp_path / "there")) == 3  # and keeps it
    with there.lookup(ROOT, as_token_ids(text(9)), pin=False) as known:
        assert known.exact == ()
    assert there.check_integrity() == []


def test_looking_at_a_remote_store_enters_nothing(open_store, tmp_path) -> None:
    url = f"file://{tmp_path}/far"
    here = open_store(remote=open_remote(url, 10**9), folder="here")
    admit(here, text(1))
    here.flush()
    there = open_store(disk=None, ram=0, remote=open_remote(url, 10**9))
    with there.lookup(ROOT, as_token_ids(text(1)), pin=False) as known:
        assert [hit.tier for hit in known.exact] == ["remote"] * 3
    assert there.stats().chunks == 0
    assert hits(there, text(1)) == ["remote"] * 3  # without room it serves all the same
    assert there.stats().chunks == 0 and there.check_integrity() == []


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=15)


@settings(max_examples=12)
@given(texts, st.integers(0, 6), st.integers(0, 6), st.integers(0, 4))
def test_budgets_hold_and_hits_are_right_for_any_sequence_of_prompts(
    tmp_path_factory, prompts, ram, disk, gpu
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    disk_bytes = disk * 4 * CHUNK_BYTES
    gpu_tier = GpuTier(gpu * CHUNK_BYTES, torch.device("cpu"))
    tiers = Tiers(RamTier(ram * CHUNK_BYTES), gpu_tier, DiskTier(folder, disk_bytes))
    store = chunk_store(tiers, CHUNK, window=CHUNK)
    try:
        for number, ids in enumerate(prompts):
            hits(store, ids)
            admit(store, ids)
            if number % 3 == 0:
                store.flush()
            tiers = store.stats().tiers
            assert tiers["ram"].nbytes <= ram * CHUNK_BYTES
            assert tiers["gpu"].nbytes <= gpu * CHUNK_BYTES
            assert bytes_in(folder) <= disk_bytes
        store.flush()
        assert store.check_integrity() == []
    finally:
        store.close()


def test_many_threads_over_all_tiers(open_store, tmp_path, monkeypatch) -> None:
    """Hits stay right and every budget holds while everything happens at once."""
    monkeypatch.setattr(writer_module, "COLD_SECONDS", 0.0)
    store = open_store(ram=10, disk=12, gpu=4)
    over: list[str] = []
    done = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            ids = [rng.randrange(3) for _ in range(rng.randrange(1, 24))]
            hits(store, ids)
            admit(store, ids)
            if rng.random() < 0.05:
                store.forget_text([as_token_ids(ids[:6])])

    def watch() -> None:
        while not done.is_set():
            for name, tier in store.stats().tiers.items():
                if tier.nbytes > tier.max_bytes:
                    over.append(name)
            if bytes_in(tmp_path / "kv") > 12 * 4 * CHUNK_BYTES:
                over.append("disk really")

    with ThreadPoolExecutor(6) as pool:
        watching = pool.submit(watch)
        working = [pool.submit(work, seed) for seed in range(5)]
        wait(working)
        done.set()
    assert [one.exception() for one in (*working, watching)] == [None] * 6 and over == []
    store.flush()
    stats = store.stats()
    assert stats.in_use == 0 and stats.moves.promoted > 0 and stats.moves.demoted > 0
    assert store.check_integrity() == []


def test_no_lookup_plans_a_chunk_whose_file_is_about_to_be_removed(open_store, monkeypatch) -> None:
    """The budget picks a chunk; before its file is gone a request looks for the same text, and
    reads it afterwards."""
    store = open_store(ram=1, disk=4)
    delete, removed, lost = DiskTier.delete, [], []

    def delete_late(tier: DiskTier, key: ChunkKey) -> None:
        removed.append(key)
        with ExitStack() as lookups:
            known = [
                lookups.enter_context(store.lookup(ROOT, as_token_ids(text(seed))))
                for seed in range(6)
            ]
            assert key not in {hit.chunk.key for rows in known for hit in rows.exact}
            delete(tier, key)
            for rows in known:
                try:
                    list(store.fetch(rows.exact))
                except ChunkLost as error:
                    lost.append(error)

    monkeypatch.setattr(DiskTier, "delete", delete_late)
    for seed in range(6):
        admit(store, text(seed))
        store.flush()
    assert removed and lost == []
    assert store.stats().tiers["disk"].faults == {} and store.stats().moves.lost == 0
    monkeypatch.undo()
    assert store.check_integrity() == []


def test_a_file_that_cannot_be_removed_stays_in_the_books(open_store, monkeypatch) -> None:
    store = open_store(disk=4)
    admit(store, text(1))
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "delete", lambda tier, key: None)
        for seed in range(2, 6):
            admit(store, text(seed))
        store.flush()
    assert store.stats().tiers["disk"].nbytes <= 4 * 4 * CHUNK_BYTES
    assert store.check_integrity() == []


def test_the_names_of_the_statistics_have_not_changed(open_store, tmp_path) -> None:
    """``cache_stats()``, the metrics and the server read them."""
    store = open_store(gpu=2, remote=open_remote(f"file://{tmp_path}/far", 10**9))
    admit(store, text(1))
    store.flush()
    stats = store.stats().as_dict()
    tier = ["chunks", "bytes", "max_bytes", "hits", "faults"]
    assert list(stats) == [
        *("chunks", "in_use", "pinned", "pinned_bytes", "max_pinned_bytes"),
        *("admitted", "tiers"),
        *("evicted", "demoted", "promoted", "unwritten", "rejected", "failed", "lost"),
    ]
    assert {name: list(value) for name, value in stats["tiers"].items()} == {
        "gpu": tier,
        "ram": tier,
        "disk": tier,
        "remote": ["state", "hits", "misses", "puts", "searches", "found", "faults", "bytes"],
        "writing": ["owed", "waiting_bytes", "max_waiting_bytes"],
    }
    assert stats["tiers"]["disk"]["chunks"] == 3 and stats["tiers"]["remote"]["puts"] == 3
    assert stats["tiers"]["gpu"]["chunks"] == 2 and stats["admitted"] == 3
    assert stats["tiers"]["ram"]["bytes"] == CHUNK_BYTES  # the one that has left the GPU


class Liar:
    """A remote store that says it has everything and gives nothing."""

    name, state, max_bytes, nbytes = "remote", "closed", 10**9, 0
    has_index = False

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.asked = 0

    def contains_many(self, keys):
        self.asked += 1
        return [True] * len(keys)

    def get(self, key, expected):
        return None

    def put(self, chunk) -> bool:
        return False

    def delete(self, key) -> None: ...

    def stats(self) -> RemoteStats:
        return RemoteStats("closed", 0, 0, 0, {}, 0)

    def close(self) -> None: ...


def test_a_remote_store_that_does_not_deliver_is_not_asked_again(open_store) -> None:
    liar = Liar()
    store = open_store(disk=None, remote=liar)
    ids = as_token_ids(text(1))
    with store.lookup(ROOT, ids) as known:
        assert [hit.tier for hit in known.exact] == ["remote"] * 3
        with pytest.raises(ChunkLost):
            list(store.fetch(known.exact))
    with store.lookup(ROOT, ids, ask_remote=False) as known:
        assert known.exact == ()
    assert liar.asked == 1 and store.stats().chunks == 0


def test_what_leaves_the_gpu_goes_to_ram_unless_another_tier_has_it(open_store) -> None:
    store = open_store(disk=None, ram=2, gpu=5)
    admit(store, text(1, 20))
    assert store.stats().tiers["gpu"].chunks == 5 and store.stats().tiers["ram"].chunks == 0
    admit(store, text(2))
    tiers = store.stats().tiers
    assert tiers["gpu"].chunks == 5 and tiers["ram"].chunks == 2
    assert store.stats().moves.evicted == 1  # the others have room in RAM
    assert store.check_integrity() == []


def test_chunks_on_the_gpu_wait_to_be_written_and_leave_it_as_copies(open_store) -> None:
    store = open_store(ram=2, gpu=4)
    writing = threading.Event()
    write = store.transfers.writer.write
    store.transfers.writer.write = lambda chunk: writing.wait() and write(chunk)
    try:
        for seed in range(4):
            admit(store, text(seed))
        tiers, waiting = store.stats().tiers, store.stats().writing
        assert tiers["gpu"].chunks == 4 and tiers["ram"].chunks == 2
        assert waiting.pending == 12 and waiting.waiting_bytes == 6 * CHUNK_BYTES
    finally:
        writing.set()
    store.flush()
    assert store.stats().tiers["disk"].chunks == 12 and store.check_integrity() == []
    assert all(len(hits(store, text(seed))) == 3 for seed in range(4))
