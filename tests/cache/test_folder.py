"""A cache folder seen from outside."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost import CacheFolderError, ConfigError
from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk, Lineage, Origin
from kvboost.cache.folder import CacheFolder
from kvboost.cache.tiers.disk import DiskTier
from kvboost.config import cache_dir, format_bytes, parse_bytes
from kvboost.errors import ForgetError
from kvboost.model.loading.tokenizer import ModelTokenizer
from kvboost.tokens.hashing import as_token_ids, branch_key
from support.chunks import ROOT, make_chunk
from support.tiny import byte_tokenizer

TOKENIZER = ModelTokenizer(byte_tokenizer())
TEXT = "A secret that the lamp keeper told nobody but the gulls on the rocks."


ONE, TWO = Origin("f1", "one"), Origin("f2", "two")


def line(*texts: str, origin: Origin = ONE) -> list[KVChunk]:
    """Chunks that contain ``texts``, each following the last."""
    made: list[KVChunk] = []
    for text in texts:
        ids, options = TOKENIZER.encode_fragment(text), {}
        if made:
            last = made[-1].info
            options = {"parent": last.key, "position": last.base_position + last.num_tokens}
        made.append(make_chunk(ids, origin=origin, **options))
    return made


def fill(path: Path, *chunks: KVChunk) -> Path:
    tier = DiskTier(path, 10**9)
    assert all(tier.put(chunk) for chunk in chunks)
    return path


def file_of(path: Path, chunk: KVChunk) -> Path:
    return path / chunk.key[:2] / f"{chunk.key}.safetensors"


def damage(path: Path, chunk: KVChunk) -> None:
    """Changes one byte of the tensors, which the header does not show."""
    data = bytearray(file_of(path, chunk).read_bytes())
    data[-1] ^= 1
    file_of(path, chunk).write_bytes(data)


def keys(path: Path) -> set[str]:
    return {entry.info.key for entry in CacheFolder(path).entries()}


@pytest.fixture
def chunks() -> list[KVChunk]:
    return [*line("the first part", " and what follows"), *line("other", origin=TWO)]


@pytest.fixture
def folder(tmp_path: Path, chunks: list[KVChunk]) -> Path:
    return fill(tmp_path / "kv", *chunks)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_printed_size_is_read_back_as_about_the_same(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= max(0, size * 0.06)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1024**2 - 1, "1MiB"), (5 * 1024**5, "5120TiB")],
)
def test_sizes_are_printed_in_units(size: int, shown: str) -> None:
    assert format_bytes(size) == shown


def test_the_environment_names_the_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.delenv("KVBOOST_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / "kv"
    monkeypatch.setenv("KVBOOST_CACHE_DIR", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"


def test_a_folder_that_is_not_a_cache_is_neither_opened_nor_touched(tmp_path: Path) -> None:
    with pytest.raises(CacheFolderError, match="does not exist"):
        CacheFolder(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "tmp-mine").write_text("")
    for create in (False, True):
        with pytest.raises(CacheFolderError, match="not a cache folder"):
            CacheFolder(tmp_path, create=create)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp-mine"]


def test_entries_give_the_depth_and_the_last_use_of_each_chunk(folder, chunks) -> None:
    first, second, other = chunks
    for moment, chunk in enumerate([other, first, second]):
        os.utime(file_of(folder, chunk), (moment, moment))
    listed = CacheFolder(folder).entries()
    assert [entry.info.key for entry in listed] == [second.key, first.key, other.key]
    assert [entry.used for entry in listed] == [2, 1, 0]
    assert [entry.depth for entry in listed] == [1, 0, 0]
    assert listed[0].nbytes == file_of(folder, second).stat().st_size


def test_the_summary_adds_up_by_model(folder, chunks) -> None:
    damage(folder, chunks[2])
    opened = CacheFolder(folder)
    opened.verify()
    summary = opened.summary()
    (one,) = summary.models
    assert (one.name, one.fingerprint, one.bits) == ("one", "f1", (16,))
    assert (one.chunks, one.tokens) == (2, sum(chunk.info.num_tokens for chunk in chunks[:2]))
    assert summary.quarantined == 1
    files = list(folder.rglob("*.safetensors"))
    assert summary.nbytes == sum(path.stat().st_size for path in files)


def test_verifying_finds_damaged_files_and_does_not_count_as_use(folder, chunks) -> None:
    damage(folder, chunks[0])
    file_of(folder, chunks[1]).write_bytes(b"nonsense")
    os.utime(file_of(folder, chunks[2]), (7, 7))
    verdict = CacheFolder(folder).verify()
    assert not verdict and (verdict.ok, verdict.bad, verdict.unreadable) == (1, 2, 0)
    assert len(list((folder / "quarantine").iterdir())) == 2
    assert file_of(folder, chunks[2]).stat().st_mtime == 7
    assert CacheFolder(folder).verify()


def test_verifying_finds_a_chunk_under_the_name_of_another(folder, chunks) -> None:
    opened = CacheFolder(folder)
    file_of(folder, chunks[0]).write_bytes(codec.encode(chunks[1]))
    assert opened.verify().bad == 1


def test_verifying_counts_unreadable_files(folder, chunks) -> None:
    file_of(folder, chunks[0]).unlink()
    file_of(folder, chunks[0]).mkdir()
    verdict = CacheFolder(folder).verify()
    assert not verdict and (verdict.ok, verdict.bad, verdict.unreadable) == (2, 0, 1)


@pytest.mark.parametrize("model", ["one", "f1"])
def test_one_model_is_cleared_by_name_or_fingerprint(folder, chunks, model: str) -> None:
    assert CacheFolder(folder).clear(model) == 2
    assert keys(folder) == {chunks[2].key}


def test_clearing_leaves_no_chunk_and_no_quarantine(folder, chunks) -> None:
    damage(folder, chunks[0])
    opened = CacheFolder(folder)
    opened.verify()
    assert opened.clear() == 3
    assert not [path for path in folder.rglob("*") if path.suffix == ".safetensors"]
    assert opened.entries() == []


@pytest.mark.parametrize("model", ["three", "f", ""])
def test_an_unknown_model_is_refused(folder, chunks, model: str) -> None:
    with pytest.raises(ConfigError, match=r"one \(f1\), two \(f2\)"):
        CacheFolder(folder).clear(model)
    assert keys(folder) == {chunk.key for chunk in chunks}


def test_clearing_fails_if_a_file_cannot_be_removed(folder, chunks) -> None:
    file_of(folder, chunks[0]).unlink()
    file_of(folder, chunks[0]).mkdir()
    with pytest.raises(CacheFolderError, match="1 of 3 files"):
        CacheFolder(folder).clear()


def test_a_folder_that_another_process_writes_to_is_not_cleared(
    folder, chunks, monkeypatch
) -> None:
    monkeypatch.setattr("kvboost.cache.tiers.disk.LOCK_SECONDS", 0.01)
    opened = CacheFolder(folder)
    locked = pytest.raises(CacheFolderError, match="could not be locked")
    with DiskTier(folder, 10**9).exclusive(), locked:
        opened.clear()
    assert keys(folder) == {chunk.key for chunk in chunks}


def test_an_export_is_imported_bit_by_bit(folder, chunks, tmp_path: Path) -> None:
    done = CacheFolder(folder).export(tmp_path / "kv.tar")
    assert (done.chunks, done.bad) == (3, 0)
    assert done.nbytes == (tmp_path / "kv.tar").stat().st_size
    other = CacheFolder(tmp_path / "other", create=True)
    assert other.install(tmp_path / "kv.tar").installed == 3
    assert other.install(tmp_path / "kv.tar").present == 3
    for chunk in chunks:
        copy = codec.read_file(file_of(tmp_path / "other", chunk))
        assert torch.equal(copy.data.tensors["kv"], chunk.data.tensors["kv"])
        assert (copy.info.parent, copy.info.origin) == (chunk.info.parent, chunk.info.origin)


def test_only_the_owner_can_read_an_export_and_no_other_file_is_left(
    folder, tmp_path: Path
) -> None:
    CacheFolder(folder).export(tmp_path / "kv.tar")
    assert stat.S_IMODE((tmp_path / "kv.tar").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"kv", "kv.tar"}


def test_an_export_that_fails_leaves_the_old_one(folder, tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "kv.tar"
    target.write_text("old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(CacheFolderError, match="No space left"):
        CacheFolder(folder).export(target)
    assert target.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"kv", "kv.tar"}


def test_one_model_or_one_text_is_exported(folder, chunks, tmp_path: Path) -> None:
    first, second, other = chunks
    target = tmp_path / "kv.tar"

    def exported(**options: str) -> set[str]:
        CacheFolder(folder).export(target, **options)
        with tarfile.open(target) as archive:
            return {Path(name).stem for name in archive.getnames()}

    assert exported(model="two") == {other.key}
    assert exported(key=second.key[:12]) == {first.key, second.key}
    assert exported(key=first.key) == {first.key}
    for key in ("zz", ""):
        with pytest.raises(ConfigError, match=f"key={key!r}"):
            exported(key=key)


def test_damaged_files_are_not_exported(folder, chunks, tmp_path: Path) -> None:
    opened = CacheFolder(folder)
    damage(folder, chunks[1])
    done = opened.export(tmp_path / "kv.tar")
    assert (done.chunks, done.bad) == (2, 1)


def test_an_import_keeps_the_budget_and_installs_beginnings_first(tmp_path: Path) -> None:
    made = line("a long first part " * 3, "second " * 9, "third")
    fill(tmp_path / "kv", *made)
    CacheFolder(tmp_path / "kv").export(tmp_path / "kv.tar")
    sizes = [len(codec.encode(chunk)) for chunk in made]
    budget = sizes[0] + sizes[2]  # the third would fit, but is useless without the second
    other = CacheFolder(tmp_path / "other", create=True, max_bytes=budget)
    done = other.install(tmp_path / "kv.tar")
    assert (done.installed, done.no_room) == (1, 2)
    assert keys(tmp_path / "other") == {made[0].key}


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(data)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for made, data in members:
            archive.addfile(made, io.BytesIO(data))
    return path


def proper_name(chunk: KVChunk) -> str:
    return f"{chunk.key[:2]}/{chunk.key}.safetensors"


def test_an_import_refuses_members_that_are_not_chunks(tmp_path: Path) -> None:
    (chunk,) = line("the first part")
    name, data = proper_name(chunk), codec.encode(chunk)
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    odd = [
        member("../escaped", data),
        member(f"/tmp/{name}", data),
        member(f"./{name}", data),
        member(f"../{name}", data),
        member(f"{name}/..", data),
        member(name.upper(), data),
        member("00/" + "0" * 32 + ".safetensors", data),
        member(".lock", data),
        member(name, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member(name, type=tarfile.LNKTYPE, linkname="../../etc/passwd"),
        member(name, type=tarfile.DIRTYPE),
        member(name, type=tarfile.FIFOTYPE),
        member(name, flipped),
        member(name, data[:-5]),
        member(name),
    ]
    outside = set(tmp_path.rglob("*"))
    source = write_tar(tmp_path / "odd.tar", *odd)
    done = CacheFolder(tmp_path / "kv", create=True).install(source)
    assert (done.refused, done.installed) == (len(odd), 0)
    new = set(tmp_path.rglob("*")) - outside - {source, tmp_path / "kv"}
    assert {path.name for path in new} <= {".lock", "CACHEDIR.TAG"}


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 200])
def test_a_file_that_is_not_an_archive_is_refused(content, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "kv.tar").write_bytes(content)
    with pytest.raises(CacheFolderError, match=r"kv\.tar' cannot be read"):
        CacheFolder(tmp_path / "kv", create=True).install(tmp_path / "kv.tar")


@pytest.mark.parametrize("length", [0, 100, 512, 522, None])
def test_the_beginning_of_a_damaged_archive_is_installed(length, folder, tmp_path: Path) -> None:
    """One that is truncated within its last member, or has another byte there."""
    CacheFolder(folder).export(tmp_path / "kv.tar")
    with tarfile.open(tmp_path / "kv.tar") as archive:
        last = archive.getmembers()[-1]
    if length is None:
        data = bytearray((tmp_path / "kv.tar").read_bytes())
        data[last.offset] = ord("~")
        (tmp_path / "kv.tar").write_bytes(data)
    else:
        os.truncate(tmp_path / "kv.tar", last.offset + length)
    with pytest.raises(CacheFolderError, match="2 chunks were installed"):
        CacheFolder(tmp_path / "other", create=True).install(tmp_path / "kv.tar")
    assert len(keys(tmp_path / "other")) == 2


PLACES = st.integers(0, 511) | st.integers(0, 10**6)  # the first header, or anywhere


@given(changes=st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_archive_never_installs_anything_else(
    changes: list[tuple[int, int]], tmp_path_factory
) -> None:
    place = tmp_path_factory.mktemp("fuzz")
    made = line("first", " second")
    members = (member(proper_name(chunk), codec.encode(chunk)) for chunk in made)
    source = write_tar(place / "kv.tar", *members)
    data = bytearray(source.read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    source.write_bytes(data)
    opened = CacheFolder(place / "kv", create=True)
    with suppress(CacheFolderError):
        opened.install(source)
    assert keys(place / "kv") <= {chunk.key for chunk in made}
    assert opened.verify()


def test_forgetting_removes_chunks_that_contain_a_text_and_those_after_them(tmp_path: Path) -> None:
    before, holds, after = line("An introduction. ", TEXT, " And so it went on.")
    (elsewhere,) = line(f"Quoted: {TEXT}")
    (innocent,) = line("Nothing of the kind is said here, nor anywhere near here.")
    fill(tmp_path / "kv", before, holds, after, elsewhere, innocent)
    assert CacheFolder(tmp_path / "kv").forget(TEXT, TOKENIZER) == 3
    assert keys(tmp_path / "kv") == {before.key, innocent.key}


def test_forgetting_finds_a_text_that_two_chunks_share(tmp_path: Path) -> None:
    fill(tmp_path / "kv", *line(f"Before. {TEXT[:30]}", f"{TEXT[30:]} After."))
    assert CacheFolder(tmp_path / "kv").forget(TEXT, TOKENIZER) == 2
    assert keys(tmp_path / "kv") == set()


def test_forgetting_empties_quarantine(folder, chunks) -> None:
    damage(folder, chunks[0])
    opened = CacheFolder(folder)
    opened.verify()
    assert opened.forget("nothing that is here", TOKENIZER) == 0
    assert not list((folder / "quarantine").iterdir())


def test_forgetting_finds_chunks_that_were_written_after_opening(tmp_path: Path) -> None:
    fill(tmp_path / "kv")
    opened = CacheFolder(tmp_path / "kv")
    fill(tmp_path / "kv", *line(TEXT))
    assert opened.forget(TEXT, TOKENIZER) == 1


def test_forgetting_fails_if_a_file_cannot_be_removed(tmp_path: Path, monkeypatch) -> None:
    fill(tmp_path / "kv", *line(TEXT))
    opened = CacheFolder(tmp_path / "kv")
    monkeypatch.setattr(DiskTier, "delete", lambda tier, key: None)
    with pytest.raises(ForgetError, match="1 files could not be removed"):
        opened.forget(TEXT, TOKENIZER)


def test_forgetting_fails_if_a_file_cannot_be_read(folder, chunks) -> None:
    file_of(folder, chunks[0]).unlink()
    file_of(folder, chunks[0]).mkdir()
    with pytest.raises(ForgetError, match="1 files could not be read"):
        CacheFolder(folder).forget(TEXT, TOKENIZER)


def test_approximate_chunks_are_listed_as_such(tmp_path: Path) -> None:
    branch = branch_key(ROOT, "a repair")
    ids = as_token_ids(range(8))
    chunk = make_chunk(ids, parent=branch, before=ROOT, lineage=Lineage.APPROXIMATE)
    (entry,) = CacheFolder(fill(tmp_path / "kv", chunk)).entries()
    assert entry.info.lineage is Lineage.APPROXIMATE
