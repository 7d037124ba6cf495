from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from support.chunks import make_chunk
from support.remote_stores import (
    AsyncFolder,
    assert_same,
    big_chunk,
    opened,
    packed_chunk,
    size_of,
    while_writing,
)


def file_of(folder: Path, chunk: KVChunk) -> Path:
    return folder / chunk.key[:2] / f"{chunk.key}.safetensors"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_files_are_named_after_their_keys(tmp_path: Path) -> None:
    chunk = packed_chunk()
    with opened(f"file://{tmp_path}") as tier:
        assert tier.put(chunk)
    assert files_in(tmp_path) == [file_of(tmp_path, chunk)]
    assert_same(codec.read_file(file_of(tmp_path, chunk)), chunk)


def test_existing_files_count_and_the_oldest_are_evicted(tmp_path: Path) -> None:
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

        counted = [tier.nbytes for _ in while_writing(write)]
        assert max(counted) <= budget
        assert tier.faults == {}
        assert tier.nbytes == on_disk() <= budget
        assert on_disk() >= 8 * size_of(chunks[0])


def test_another_writers_files_are_counted_in_time(tmp_path: Path) -> None:
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
        assert len(list(tier.list_chunks().infos)) + tier.faults.get("corrupt", 0) == 1
        assert tier.get(chunk.key) is None
        assert not path.exists()
        assert tier.faults["corrupt"] >= 1
        assert tier.put(chunk)
        assert_same(tier.get(chunk.key), chunk)


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("name", ["pipe_file", "mv"])
def test_a_full_disk_leaves_no_partial_file(
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
        assert files_in(tmp_path) == [file_of(tmp_path, chunks[0])]
        assert tier.nbytes == size_of(chunks[0])
        assert tier.put(chunks[1])


def test_a_file_that_cannot_be_deleted_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [big_chunk(1), big_chunk(2)]
    with opened(str(tmp_path), max_bytes=size_of(chunks[0])) as tier:
        assert tier.put(chunks[0])
        monkeypatch.setattr(LocalFileSystem, "rm_file", failing(PermissionError("not yours")))
        assert not tier.put(chunks[1])
        assert tier.keys() == [chunks[0].key]
        assert tier.nbytes == size_of(chunks[0])


def test_a_path_that_is_not_a_folder_opens_the_breaker(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with opened(str(tmp_path / "file" / "folder")) as tier:
        assert [tier.get(make_chunk([1]).key) for _ in range(9)] == [None] * 9
        assert tier.faults == {"unreachable": 3}
        assert tier.state == "open"
        assert tier.nbytes == 0


def test_a_stalled_store_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = big_chunk(1)
    with opened(f"asyncfolder://{tmp_path}", socket_timeout=0.3) as tier:
        assert tier.put(chunk)
        monkeypatch.setattr(AsyncFolder, "stalled", True)
        assert tier.get(chunk.key) is None
        assert not tier.contains_many([chunk.key])[0]
        assert not tier.put(big_chunk(2))
        assert not tier.put(big_chunk(2))
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


def test_a_file_that_is_being_written_is_not_evicted(
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
