"""Forgetting may take as long as disks and networks do. Requests and pins do not wait for it, and
nothing that they bring in meanwhile keeps the text."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.remote.tier import open_remote
from kvboost.errors import ForgetError
from kvboost.tokens.hashing import as_token_ids
from support.chunks import ROOT, chunk_store, make_chunk, packing
from support.planting import chunk_files

CHUNK = 32
TEXT, OTHER = list(range(200)), list(range(1000, 1200))

Act = Callable[[ChunkStore], Any]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    tiers = Tiers(RamTier(10**7), disk=DiskTier(tmp_path / "kv", 10**7))
    made = chunk_store(tiers, CHUNK)
    yield made
    assert made.check_integrity() == []
    made.close()


def admit(store: ChunkStore, ids: list[int], epoch: int | None = None) -> int:
    rows = packing(torch.zeros(2, 1, 1, len(ids), 1))
    return store.admit(ROOT, as_token_ids(ids), rows, exact_rows=len(ids), epoch=epoch)


def chunks_of(ids: list[int]) -> Iterator[KVChunk]:
    parent = ROOT
    for start in range(0, len(ids), CHUNK):
        chunk = make_chunk(ids[start : start + CHUNK], parent=parent, position=start)
        yield chunk
        parent = chunk.key


def known(store: ChunkStore, ids: list[int]) -> int:
    """How many of the first tokens are stored."""
    with store.lookup(ROOT, as_token_ids(ids)) as found:
        return found.exact[-1].end if found.exact else 0


def forget(store: ChunkStore) -> int:
    return store.forget_text([as_token_ids(TEXT)])


def during(store: ChunkStore, step: str, act: Act) -> None:
    """Calls ``act`` when the next removal comes to ``step``, which is slow."""
    transfers: Any = store.transfers
    real = getattr(transfers, step)

    def slow(*args: object) -> object:
        setattr(transfers, step, real)
        act(store)
        return real(*args)

    setattr(transfers, step, slow)


def read_again(store: ChunkStore) -> None:
    """By a request that is planned and ends now."""
    assert admit(store, TEXT, store.epoch) == 7
    store.flush()


SLOW: list[tuple[Act, str]] = [
    (forget, "list_remote"),
    (forget, "await_writing"),
    (forget, "purge"),
    (lambda store: store.forget(ROOT), "list_remote"),
    (ChunkStore.clear, "await_writing"),
    (ChunkStore.clear, "remove_files"),
]


@pytest.mark.parametrize(("remove", "step"), SLOW)
def test_requests_and_pins_do_not_wait_for_a_slow_removal(
    remove: Act, step: str, store: ChunkStore
) -> None:
    admit(store, TEXT)
    store.flush()
    slow, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hold(_: ChunkStore) -> None:
        slow.set()
        assert go_on.wait(60)

    during(store, step, hold)

    def request() -> None:
        assert admit(store, OTHER) == 7 and known(store, OTHER) == 200
        assert store.pin("mine", ROOT, as_token_ids(OTHER)).tokens == 200
        assert [pin.name for pin in store.pins()] == ["mine"]
        store.stats()
        store.unpin("mine")
        done.set()

    removing = threading.Thread(target=remove, args=(store,))
    removing.start()
    assert slow.wait(60)
    threading.Thread(target=request, daemon=True).start()
    in_time = done.wait(30)
    go_on.set()
    removing.join()
    assert in_time
    assert known(store, TEXT) == 0 and known(store, OTHER) in (0, 200)


def test_what_a_request_planned_meanwhile_has_kept_is_forgotten_too(store: ChunkStore) -> None:
    """It has used the chunks that are about to be dropped, and continues the text."""
    admit(store, TEXT)
    longer = [*TEXT, *range(5000, 5100)]
    during(store, "list_remote", lambda store: admit(store, longer, store.epoch))
    forget(store)
    assert known(store, longer) == 0 and store.stats().chunks == 0


def test_nothing_is_kept_of_a_request_planned_meanwhile_that_ends_later(store: ChunkStore) -> None:
    admit(store, TEXT)
    epochs = [store.epoch]
    during(store, "list_remote", lambda store: epochs.append(store.epoch))
    forget(store)
    assert [admit(store, TEXT, epoch) for epoch in epochs] == [0, 0]
    assert admit(store, TEXT, store.epoch) == 7


@pytest.mark.parametrize("step", ["await_writing", "purge", "remove_files"])
def test_a_text_that_is_read_again_meanwhile_is_forgotten_too(
    step: str, store: ChunkStore, tmp_path: Path
) -> None:
    """Chunks are named by what they hold: the new ones have the keys of those just dropped."""
    admit(store, TEXT)
    store.flush()
    during(store, step, read_again)
    assert forget(store) == 7
    assert known(store, TEXT) == 0 and chunk_files(tmp_path / "kv") == []


def test_a_text_that_is_read_again_and_again_is_no_failure(
    store: ChunkStore, tmp_path: Path
) -> None:
    """What is read after the second look stays, also on disk where the old files are removed."""
    admit(store, TEXT)
    store.flush()

    def read_twice(store: ChunkStore) -> None:
        read_again(store)
        during(store, "remove_files", read_again)

    during(store, "remove_files", read_twice)
    assert forget(store) == 7
    assert known(store, TEXT) == 200


def test_what_a_request_finds_in_the_remote_store_meanwhile_is_forgotten(tmp_path: Path) -> None:
    tiers = Tiers(RamTier(10**7), remote=open_remote(f"file://{tmp_path}/far", 10**9))
    made = chunk_store(tiers, CHUNK)

    def use(store: ChunkStore) -> None:
        with store.lookup(ROOT, as_token_ids(TEXT)) as found:
            assert len(list(store.fetch(found.exact))) == 7

    with contextlib.closing(made) as store:
        admit(store, TEXT)
        store.flush()
        during(store, "purge", use)
        assert forget(store) == 7
        assert known(store, TEXT) == 0 and store.stats().tiers["ram"].chunks == 0
        assert store.check_integrity() == []


def test_what_another_thread_has_found_and_not_entered_yet_is_forgotten(
    store: ChunkStore, tmp_path: Path
) -> None:
    with contextlib.closing(DiskTier(tmp_path / "kv", 10**7)) as other_process:
        for chunk in chunks_of(TEXT):
            assert other_process.put(chunk)
    disk: Any = store.transfers.disk
    found, over, look = threading.Event(), threading.Event(), disk.refresh

    def look_and_wait(**options: bool) -> object:
        changes = look(**options)
        if changes.added:
            found.set()
            over.wait(0.3)  # never so long if forgetting did not wait for this thread
        return changes

    disk.refresh = look_and_wait
    looking = threading.Thread(target=store.transfers.refresh, kwargs={"now": True})
    looking.start()
    assert found.wait(60)
    assert forget(store) == 7
    over.set()
    looking.join()
    assert store.stats().chunks == 0 and chunk_files(tmp_path / "kv") == []


def test_a_file_that_cannot_be_removed_is_named_until_it_is(
    store: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says to call again; that call knows nothing of the text but its files."""
    admit(store, TEXT)
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "delete", lambda tier, key: None)
        for _ in range(2):
            with pytest.raises(ForgetError, match="7 in disk may be left"):
                forget(store)
    assert len(chunk_files(tmp_path / "kv")) == 7
    assert forget(store) == 0 and chunk_files(tmp_path / "kv") == []
