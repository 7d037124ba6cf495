"""Two versions of KVBoost over one folder or remote store: neither uses, damages or removes what
the other has written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvboost import GenerationMode
from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.folder import CacheFolder
from kvboost.cache.tiers.disk import DiskTier
from kvboost.checks.rehearsal import rehearse
from kvboost.errors import CacheFolderError, ForgetError
from kvboost.model.loading.tokenizer import ModelTokenizer
from support.chunks import make_chunk
from support.planting import OTHER_VERSIONS, PROMPT, chunk_files, plant, remote
from support.remote_stores import opened
from support.tiny import byte_tokenizer

PREFIX = GenerationMode.PREFIX_CACHE
NEWER = OTHER_VERSIONS["a newer format"]
SOME_VERSIONS = ("a newer format", "a newer format without any of our fields")


def rewritten(folder: Path, fields: dict[str, str]) -> dict[Path, bytes]:
    """All chunks, as another version would have written them, and what they are then."""
    return {path: plant(path, **fields).read_bytes() for path in chunk_files(folder)}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "another version" in record.message]


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_chunks_of_another_version_are_misses_and_stay(
    version, open_engine, expected, tmp_path, caplog
) -> None:
    folder = tmp_path / "kv"
    theirs = rewritten(folder, OTHER_VERSIONS[version])
    with caplog.at_level(logging.WARNING):
        engine = open_engine()
        for _ in range(2):
            result = engine.generate(PROMPT, 4, PREFIX)
            assert result.token_ids == expected
        engine.flush()
    assert engine.cache_stats()["tiers"]["disk"]["faults"] == {"version": len(theirs)}
    (line,) = lines(caplog)
    assert f"{len(theirs)} chunks in {folder}" in line and "kvboost cache clear" in line
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert not (folder / "quarantine").exists()
    assert engine.check_integrity() == []


@pytest.mark.parametrize("version", SOME_VERSIONS)
def test_a_remote_store_keeps_chunks_of_another_version(
    version, open_engine, expected, tmp_path, caplog
) -> None:
    theirs = rewritten(tmp_path / "far", OTHER_VERSIONS[version])
    engine = open_engine(disk_cache_dir=None, **remote(tmp_path))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert engine.generate(PROMPT, 4, PREFIX).token_ids == expected
        engine.flush()
    faults = engine.cache_stats()["tiers"]["remote"]["faults"]
    assert faults.keys() == {"version"} and len(lines(caplog)) == 1
    assert {path: path.read_bytes() for path in theirs} == theirs


def test_a_chunk_that_another_version_writes_meanwhile_is_a_miss(
    open_engine, expected, tmp_path
) -> None:
    """An engine has read the header of its own chunk; then a newer process takes its place."""
    engine = open_engine()
    theirs = rewritten(tmp_path / "kv", NEWER)
    assert engine.generate(PROMPT, 4, PREFIX).token_ids == expected
    assert engine.cache_stats()["tiers"]["disk"]["faults"].keys() == {"version"}
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert engine.check_integrity() == []


def test_the_newer_version_finds_its_chunks_again(open_engine, expected, tmp_path) -> None:
    """After a downgrade and back: what the older one has written beside them stays too."""
    folder = tmp_path / "kv"
    ours = {path: path.read_bytes() for path in chunk_files(folder)}
    rewritten(folder, NEWER)
    with open_engine() as older:
        older.generate("Something else that the older version reads. " * 3, 4, PREFIX)
    added = set(chunk_files(folder)) - set(ours)
    assert added
    for path, data in ours.items():
        path.write_bytes(data)
    result = open_engine().generate(PROMPT, 4, PREFIX)
    assert result.token_ids == expected and result.exact_tokens > 64
    assert added <= set(chunk_files(folder))


def numbered(number: int) -> KVChunk:
    return make_chunk(range(number, number + 8))


def test_chunks_of_another_version_take_room_until_it_is_needed(tmp_path: Path) -> None:
    size = len(codec.encode(numbered(1)))
    before = DiskTier(tmp_path, 10**6)
    for number in range(4):
        before.put(numbered(number))
    theirs = [plant(path, **NEWER) for path in chunk_files(tmp_path)]
    for age, path in enumerate(reversed(theirs)):
        os.utime(path, ns=(age, age))
    tier = DiskTier(tmp_path, 5 * size + 20)
    assert tier.refresh(now=True).added == () and tier.keys() == []
    assert tier.nbytes == sum(path.stat().st_size for path in theirs)
    assert tier.put(numbered(5))
    assert all(path.exists() for path in theirs)
    assert tier.put(numbered(6))
    assert [path.exists() for path in theirs] == [True, True, True, False]
    assert tier.nbytes <= tier.max_bytes


def test_names_of_chunks_of_another_version_are_not_written_over(tmp_path: Path) -> None:
    DiskTier(tmp_path, 10**6).put(numbered(1))
    (path,) = chunk_files(tmp_path)
    theirs = plant(path, **NEWER).read_bytes()
    tier = DiskTier(tmp_path, 10**6)
    tier.refresh(now=True)
    assert tier.is_blocked(numbered(1).key) and not tier.put(numbered(1))
    assert tier.get(numbered(1).key) is None
    assert path.read_bytes() == theirs


def test_the_commands_count_them_and_leave_them_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    before = DiskTier(folder, 10**6)
    for number in range(3):
        before.put(numbered(number))
    theirs = plant(chunk_files(folder)[0], **NEWER)
    size = theirs.stat().st_size
    opened = CacheFolder(folder)
    found = opened.summary()
    assert (found.chunks, found.others, found.other_bytes) == (2, 1, size)
    verdict = opened.verify()
    assert (verdict.ok, verdict.bad, verdict.other_version) == (2, 0, 1) and not verdict
    assert opened.export(tmp_path / "kv.tar").chunks == 2
    assert opened.install(tmp_path / "kv.tar").present == 2
    assert opened.clear("a model") == 2 and theirs.exists()
    assert CacheFolder(folder).clear() == 1 and not theirs.exists()


def test_forgetting_a_text_removes_what_cannot_be_searched(open_engine, expected, tmp_path) -> None:
    """Their chunks may hold the text."""
    folder = tmp_path / "kv"
    rewritten(folder, NEWER)
    assert CacheFolder(folder).forget("lazy dog", ModelTokenizer(byte_tokenizer())) == 0
    assert chunk_files(folder) == []
    with open_engine() as engine:
        engine.generate(PROMPT, 4, PREFIX)
    rewritten(folder, NEWER)
    engine = open_engine()
    engine.forget("lazy dog")
    assert chunk_files(folder) == []


@pytest.mark.parametrize("version", SOME_VERSIONS)
def test_forgetting_names_what_cannot_be_searched_in_the_remote_store(
    version, open_engine, expected, tmp_path
) -> None:
    """Other machines share it, so their chunks stay; what this version wrote beside them goes."""
    theirs = rewritten(tmp_path / "far", OTHER_VERSIONS[version])
    engine = open_engine(disk_cache_dir=None, **remote(tmp_path))
    engine.generate("Another lazy dog, that nobody has read about before. " * 3, 4, PREFIX)
    engine.flush()
    assert len(chunk_files(tmp_path / "far")) > len(theirs)
    said = rf"others may be left: {len(theirs)} in remote cannot be searched"
    for _ in range(2):
        with pytest.raises(ForgetError, match=said):
            engine.forget("lazy dog")
    assert {path: path.read_bytes() for path in chunk_files(tmp_path / "far")} == theirs
    assert engine.cache_stats()["tiers"]["remote"]["faults"] == {"version": len(theirs)}
    for path in theirs:
        path.unlink()
    assert engine.forget("lazy dog") == 0


def test_checks_do_not_fail_because_of_them(open_engine, expected, tmp_path) -> None:
    """They forget their made-up salts when they end."""
    rewritten(tmp_path / "far", NEWER)
    engine = open_engine(disk_cache_dir=None, **remote(tmp_path))
    assert engine.verify_correctness(2)
    rehearse(engine, 1)


def test_lock_files_of_another_version_do_no_harm(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    lock.write_text('{"version": 3, "process": 1, "host": "elsewhere"}')
    tier = DiskTier(tmp_path, 10**6)
    assert tier.put(numbered(1)) and tier.faults == {}
    assert "elsewhere" in lock.read_text()


def test_a_lock_that_cannot_be_a_file_leaves_the_folder_readable(tmp_path: Path) -> None:
    DiskTier(tmp_path, 10**6).put(numbered(1))
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    tier = DiskTier(tmp_path, 10**6)
    assert [info.key for info in tier.refresh(now=True).added] == [numbered(1).key]
    assert tier.get(numbered(1).key) is not None
    assert not tier.put(numbered(2)) and tier.faults == {"unwritable": 2}


@pytest.mark.parametrize("name", [".lock.v2", "index.sqlite", "objects"])
def test_a_folder_that_another_version_has_arranged_is_refused_with_a_reason(
    name: str, tmp_path: Path
) -> None:
    DiskTier(tmp_path, 10**6).put(numbered(1))
    (tmp_path / name).write_text("theirs")
    with pytest.raises(CacheFolderError, match=rf"'{name}' \(perhaps of another version.*choose"):
        DiskTier(tmp_path, 10**6)
    assert (tmp_path / name).read_text() == "theirs" and len(chunk_files(tmp_path)) == 1


def test_redis_keeps_chunks_of_another_version(server, tmp_path: Path) -> None:
    chunk = numbered(1)
    DiskTier(tmp_path, 10**6).put(chunk)
    theirs = plant(chunk_files(tmp_path)[0], **NEWER).read_bytes()
    with opened(server.url) as tier:
        assert tier.backend.put(chunk.key, theirs)
        assert tier.list_chunks().infos == () and tier.get(chunk.key) is None
        assert tier.faults == {"version": 1}
        assert tier.backend.get(chunk.key) == theirs
