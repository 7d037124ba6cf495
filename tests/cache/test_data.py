from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.data import ChunkData
from kvboost.cache.mixed import with_states
from kvboost.cache.quantize import KVFormat
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.remote.tier import open_remote
from kvboost.tokens.hashing import ChunkKey
from support.chunks import make_chunk
from support.planting import WRONG, chunk_files, rewrite

FORMAT = KVFormat(2, 1, 4, torch.float32)
CHUNK_BYTES = make_chunk([1, 2, 3, 4]).nbytes

Open = Callable[..., ChunkData]


@pytest.fixture
def open_data(tmp_path: Path) -> Iterator[Open]:
    opened: list[ChunkData] = []

    def open_data(ram: int = 100, disk: bool = False, remote: bool = False) -> ChunkData:
        """``ram`` in chunks."""
        tiers = Tiers(
            RamTier(ram * CHUNK_BYTES),
            disk=DiskTier(tmp_path / "kv", 1 << 24) if disk else None,
            remote=open_remote(f"file://{tmp_path / 'far'}", 1 << 24) if remote else None,
        )
        opened.append(ChunkData(tiers, format=FORMAT))
        return opened[-1]

    yield open_data
    for one in opened:
        one.close()


def text(*numbers: int) -> list[KVChunk]:
    """Chunks that follow one another."""
    chunks: list[KVChunk] = []
    for number in numbers:
        parent = {"parent": chunks[-1].key} if chunks else {}
        chunks.append(make_chunk([number] * 4, position=4 * len(chunks), **parent))
    return chunks


def keys_of(chunks: list[KVChunk]) -> list[ChunkKey]:
    return [chunk.key for chunk in chunks]


def is_there(data: ChunkData, chunks: list[KVChunk]) -> bool:
    got = data.fetch([chunk.info for chunk in chunks])
    if got is None:
        return False
    for mine, its in zip(got, chunks, strict=True):
        assert torch.equal(mine.data.tensors["kv"], its.data.tensors["kv"])
    return True


def test_what_is_put_is_fetched_as_it_was(open_data: Open) -> None:
    data, chunks = open_data(), text(1, 2, 3)
    data.put(chunks)
    assert data.is_ready(keys_of(chunks)) and is_there(data, chunks)
    assert data.take_gone() == [] and data.stats()["ram"].hits == 3


def test_at_hand_are_chunks_of_the_fastest_tier_that_are_as_planned(open_data: Open) -> None:
    data, chunks = open_data(ram=2, disk=True), text(1, 2)
    data.put(chunks)
    data.flush()
    infos = [chunk.info for chunk in chunks]
    assert data.at_hand(infos) == chunks
    assert data.at_hand([infos[0], replace(infos[1], base_position=8)]) is None
    data.put(text(3, 4))
    assert data.at_hand(infos) is None and is_there(data, chunks)


def test_what_is_evicted_is_reported_once(open_data: Open) -> None:
    data, old, new = open_data(ram=3), text(1, 2), text(3, 4)
    data.put(old)
    data.put(new)
    assert data.take_gone() == [old[1].key]
    assert data.take_gone() == []
    assert is_there(data, new) and not is_there(data, old)


def test_what_finds_no_room_is_gone_and_so_are_the_chunks_after_it(open_data: Open) -> None:
    data = open_data(ram=1)
    first, large, last = text(1)[0], make_chunk([2] * 40), make_chunk([3] * 4)
    data.put([first, large, last])
    assert data.take_gone() == [large.key, last.key]
    assert is_there(data, [first])


def test_with_a_folder_evicted_chunks_are_not_gone(open_data: Open) -> None:
    data, old, new = open_data(ram=2, disk=True), text(1, 2), text(3, 4)
    for chunks in (old, new):
        data.put(chunks)
        data.flush()
    assert data.take_gone() == []
    assert not data.is_ready(keys_of(old)) and is_there(data, old)
    assert data.stats()["disk"].hits == 2


def test_a_chunk_that_is_lost_is_none_and_reported(open_data: Open, tmp_path: Path) -> None:
    open_data(disk=True).put(text(1, 2))
    chunks = text(1, 2)
    opened = open_data(disk=True)  # holds nothing in memory
    opened.flush()
    for path in chunk_files(tmp_path / "kv"):
        path.unlink()
    assert not is_there(opened, [make_chunk([9] * 4)])
    assert opened.take_gone() == [make_chunk([9] * 4).key]
    assert not is_there(opened, chunks[:1])


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_file_that_is_not_what_was_planned_does_not_serve(
    open_data: Open, tmp_path: Path, tier: str
) -> None:
    chunks = text(1)
    writer = open_data(**{tier: True})
    writer.put(chunks)
    writer.flush()
    rewrite(
        chunk_files(tmp_path / {"disk": "kv", "remote": "far"}[tier])[0], WRONG["another dtype"]
    )
    reader = open_data(**{tier: True})
    assert not is_there(reader, chunks)
    assert chunks[0].key in reader.take_gone()


def test_a_chunk_in_memory_that_is_not_what_was_planned_does_not_serve(open_data: Open) -> None:
    data, chunk = open_data(), text(1)[0]
    data.put([chunk])
    assert data.fetch([replace(chunk.info, base_position=8)]) is None
    assert data.take_gone() == [chunk.key]


def test_what_another_process_wrote_outlasts_its_eviction_from_memory(open_data: Open) -> None:
    """It was not in the folder when this process looked first."""
    reader, writer, chunks = open_data(ram=1, disk=True), open_data(disk=True), text(1, 2)
    writer.put(chunks)
    writer.flush()
    assert is_there(reader, chunks[:1]) and is_there(reader, chunks)
    reader.put([make_chunk([5] * 4)])
    reader.flush()
    assert reader.take_gone() == []


def test_dropped_chunks_leave_memory_and_folder_and_are_not_reported(
    open_data: Open, tmp_path: Path
) -> None:
    data, chunks = open_data(disk=True), text(1, 2)
    data.put(chunks)
    data.drop(keys_of(chunks[1:]))
    data.flush()
    assert [path.stem for path in chunk_files(tmp_path / "kv")] == keys_of(chunks[:1])
    assert data.take_gone() == []
    assert not is_there(data, chunks) and is_there(data, chunks[:1])


def test_purge_reaches_the_remote_store(open_data: Open) -> None:
    data, chunks = open_data(remote=True), text(1, 2)
    data.put(chunks)
    data.flush()
    data.drop(keys_of(chunks))
    assert is_there(data, chunks)  # from afar
    assert data.purge(keys_of(chunks)) == {}
    assert not is_there(data, chunks)


def test_a_chunk_that_is_put_again_while_it_is_written_is_not_gone(
    open_data: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, put = threading.Event(), DiskTier.put

    def slowly(tier: DiskTier, chunk: KVChunk) -> bool:
        begun.set()
        time.sleep(0.2)
        return put(tier, chunk)

    monkeypatch.setattr(DiskTier, "put", slowly)
    data, chunks = open_data(disk=True), text(1, 2)
    data.put(chunks)
    writing = threading.Thread(target=data.flush)
    writing.start()
    assert begun.wait(10)
    data.drop([chunks[0].key])
    data.put(chunks[:1])
    writing.join()
    assert not data.take_gone() and is_there(data, chunks[:1])


@pytest.mark.parametrize("state_every", [None, 12])
def test_a_chunk_with_states_costs_the_reading_up_to_the_next_ones(
    state_every: int | None,
) -> None:
    """Without it, that of its own rows. What costs least leaves first."""
    deep, shallow, last = (
        make_chunk(
            [number] * 4,
            data=with_states(make_chunk([number] * 4).data, [torch.ones(2)]),
            position=position,
        )
        for number, position in ((1, 12), (2, 0), (3, 12))
    )
    tiers = Tiers(RamTier(2 * deep.nbytes))
    data = ChunkData(tiers, format=FORMAT, state_every=state_every)
    for chunk in (deep, shallow, last):
        data.put([chunk])
    assert data.take_gone() == [deep.key if state_every is None else shallow.key]
    data.close()
