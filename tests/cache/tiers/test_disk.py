from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.tiers import files
from kvboost.cache.tiers.disk import DiskTier
from kvboost.errors import CacheFolderError
from support.chunks import make_chunk


def numbered(number: int) -> KVChunk:
    return make_chunk(range(number, number + 8))


def file_of(tier: DiskTier, chunk: KVChunk) -> Path:
    return tier.folder / chunk.key[:2] / f"{chunk.key}.safetensors"


def seen(tier: DiskTier) -> set[str]:
    """What another look at the folder adds."""
    return {info.key for info in tier.refresh(now=True).added}


def test_the_next_process_finds_what_was_put(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 10**6)
    chunk = numbered(1)
    assert tier.put(chunk) and tier.put(chunk)
    assert tier.contains(chunk.key) and tier.keys() == [chunk.key]
    assert tier.nbytes == file_of(tier, chunk).stat().st_size
    again = DiskTier(tmp_path / "kv", 10**6)
    (info,) = again.refresh(now=True).added
    assert (info.key, info.token_ids.tolist()) == (chunk.key, chunk.info.token_ids.tolist())
    found = again.get(chunk.key)
    assert found is not None
    assert torch.equal(found.data.tensors["kv"], chunk.data.tensors["kv"])
    again.delete(chunk.key)
    assert not file_of(tier, chunk).exists() and again.nbytes == 0
    assert tier.get(chunk.key) is None and tier.faults == {"vanished": 1}


def test_only_the_user_can_read_the_folder(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 10**6)
    tier.put(numbered(1))
    for folder in (tier.folder, file_of(tier, numbered(1)).parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (tier.folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f59")


def test_the_budget_holds_quarantine_included(tmp_path: Path) -> None:
    size = len(codec.encode(numbered(1)))
    tier = DiskTier(tmp_path, 2 * size + 10)
    assert tier.put(numbered(1)) and tier.put(numbered(2))
    assert not tier.put(numbered(3))
    assert not file_of(tier, numbered(3)).exists()
    file_of(tier, numbered(2)).write_bytes(b"x" * size)
    assert tier.get(numbered(2).key) is None
    assert tier.nbytes == 2 * size  # it is in quarantine
    assert tier.put(numbered(3))  # which makes room first
    assert not list((tmp_path / "quarantine").iterdir())
    assert tier.nbytes <= tier.max_bytes


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign", "swapped"])
def test_a_damaged_file_is_a_counted_miss_and_goes_into_quarantine(damage, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 10**6)
    chunk = numbered(1)
    tier.put(chunk)
    path = file_of(tier, chunk)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-5] ^= 4
    path.write_bytes(
        {
            "flip": bytes(data),
            "truncate": bytes(data[:-9]),
            "empty": b"",
            "foreign": b"hello" * 99,
            "swapped": codec.encode(numbered(2)),
        }[damage]
    )
    assert tier.get(chunk.key) is None
    assert tier.faults == {"corrupt": 1}
    assert not path.exists() and (tmp_path / "quarantine" / path.name).exists()
    assert not tier.contains(chunk.key)
    assert tier.put(chunk) and tier.get(chunk.key) is not None
    # And so at the next start, as far as the header shows it.
    if damage in ("empty", "foreign", "swapped"):
        path.write_bytes({"empty": b"", "foreign": b"x" * 99}.get(damage, bytes(data[:300])))
        again = DiskTier(tmp_path, 10**6)
        assert again.refresh(now=True).added == () and again.faults == {"corrupt": 1}


def started(folder: Path) -> DiskTier:
    """A tier over ``folder``, opened and refreshed in time: nothing there may stop it."""
    found: list[DiskTier] = []

    def start() -> None:
        tier = DiskTier(folder, 10**7)
        tier.refresh(now=True)
        found.append(tier)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(120)
    assert found, "the start hangs or failed"
    return found[0]


def test_a_link_named_quarantine_is_not_followed(tmp_path: Path) -> None:
    """Files there are neither counted nor removed, even if they have names of ours."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [elsewhere / f"{number:032x}.safetensors" for number in range(40)]
    for path in others:
        path.write_text("mine")
    folder = tmp_path / "kv"
    DiskTier(folder, 10**7).put(numbered(1))
    (folder / "quarantine").symlink_to(elsewhere)
    tier = started(folder)
    file_of(tier, numbered(1)).write_bytes(b"damaged")
    for _ in range(2):
        assert tier.get(numbered(1).key) is None
    tier.drop_unread(10**7)
    tier.clear_quarantine()
    assert tier.quarantined() == {}
    assert sorted(elsewhere.iterdir()) == others
    assert all(path.read_text() == "mine" for path in others)
    assert tier.faults["foreign"] == 1
    assert seen(tier) == set()  # what could not be put aside is passed over


def test_only_regular_files_with_our_names_are_removed_from_quarantine(tmp_path: Path) -> None:
    aside = tmp_path / "quarantine"
    aside.mkdir()
    (aside / "notes.txt").write_text("mine")
    (aside / f"{1:032x}.safetensors").symlink_to(tmp_path / "nowhere")
    (aside / f"{2:032x}.safetensors").write_text("old")
    tier = started(tmp_path)
    assert list(tier.quarantined()) == [f"{2:032x}.safetensors"]
    tier.clear_quarantine()
    assert sorted(path.name for path in aside.iterdir()) == [f"{1:032x}.safetensors", "notes.txt"]


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "folder"])
def test_anything_but_a_file_under_the_name_of_a_chunk_is_passed_over(kind, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = DiskTier(folder, 10**7)
    tier.put(numbered(1))
    place, target = file_of(tier, numbered(2)), tmp_path / "target"
    data = codec.encode(numbered(2))
    target.write_bytes(data)
    place.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    again = started(folder)
    assert again.keys() == [numbered(1).key]
    assert again.get(numbered(2).key) is None
    assert again.is_blocked(numbered(2).key) and not again.put(numbered(2))
    again.delete(numbered(2).key)
    assert os.path.lexists(place) and target.read_bytes() == data
    assert again.faults == {"foreign": 1, "unwritable": 1}


def test_a_link_to_a_folder_of_chunks_is_passed_over(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    tier = DiskTier(folder, 10**7)
    tier.put(numbered(1))
    shard = file_of(tier, numbered(1)).parent
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    again = started(folder)
    assert again.keys() == [] and again.faults == {"foreign": 1}
    assert again.get(numbered(1).key) is None
    again.delete(numbered(1).key)
    assert not again.put(numbered(1))
    assert [path.name for path in elsewhere.iterdir()] == [file_of(tier, numbered(1)).name]


@pytest.mark.parametrize("kind", ["dangling link", "fifo"])
def test_a_tag_that_is_not_a_file_is_refused(kind, tmp_path: Path) -> None:
    folder, target = tmp_path / "kv", tmp_path / "target"
    folder.mkdir()
    if kind == "fifo":
        os.mkfifo(folder / "CACHEDIR.TAG")
    else:
        (folder / "CACHEDIR.TAG").symlink_to(target)
    with pytest.raises(CacheFolderError, match=r"CACHEDIR\.TAG"):
        DiskTier(folder, 10**6)
    assert not target.exists()


def test_a_cache_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    """The user chose that path."""
    (tmp_path / "really").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "really")
    tier = DiskTier(tmp_path / "kv", 10**6)
    assert tier.put(numbered(1)) and tier.get(numbered(1).key) is not None
    assert started(tmp_path / "kv").keys() == [numbered(1).key]


def test_a_file_that_this_process_removes_while_it_is_read_is_no_fault(
    tmp_path: Path, monkeypatch
) -> None:
    """A thread makes room while another one reads: a miss, and nothing went wrong."""
    tier = DiskTier(tmp_path, 10**6)
    tier.put(numbered(1))
    read = codec.read_file

    def read_late(*args: object) -> KVChunk:
        tier.delete(numbered(1).key)
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(codec, "read_file", read_late)
        assert tier.get(numbered(1).key) is None
    assert tier.faults == {}


def test_a_file_that_is_just_being_removed_is_no_fault(tmp_path: Path, monkeypatch) -> None:
    """The file is gone, and the tier has not noted it yet."""
    tier = DiskTier(tmp_path, 10**6)
    tier.put(numbered(1))
    remove = files.remove

    def remove_and_read(name: str, folder: int) -> None:
        remove(name, folder)
        assert tier.contains(numbered(1).key) and tier.get(numbered(1).key) is None

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", remove_and_read)
        tier.delete(numbered(1).key)
    assert tier.faults == {} and not tier.contains(numbered(1).key)


def test_files_with_other_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    for name in ("ab/model.safetensors", "ab/x.txt"):
        (tmp_path / name).write_text("mine")
    tier = DiskTier(tmp_path, 10**6)
    assert tier.refresh(now=True).added == ()
    assert {path.read_text() for path in tmp_path.glob("ab/*")} == {"mine"}


@pytest.mark.parametrize("name", ["tmp-thesis.txt", "notes.txt", "CACHEDIR.TAG"])
def test_a_folder_of_other_files_is_refused_and_not_changed(name, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(CacheFolderError, match=f"such as '{name}'; choose a new folder"):
        DiskTier(tmp_path, 10**6)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_file_that_cannot_be_read_for_a_moment_is_tried_again(tmp_path: Path, monkeypatch):
    tier = DiskTier(tmp_path, 10**6)
    tier.put(numbered(1))

    def no_handles(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(codec, "read_file", no_handles)
        assert tier.get(numbered(1).key) is None
    assert tier.faults == {"unreadable": 1} and file_of(tier, numbered(1)).exists()
    assert tier.get(numbered(1).key) is not None


def test_processes_see_each_others_chunks(tmp_path: Path) -> None:
    one, two = DiskTier(tmp_path, 10**6), DiskTier(tmp_path, 10**6)
    for number in range(6):
        one.put(numbered(number))
        assert seen(two) == {numbered(number).key}
        if number % 2:
            two.delete(numbered(number).key)
    one.put(numbered(99))
    gone = set(one.refresh(now=True).gone)
    assert gone == {numbered(number).key for number in range(1, 6, 2)}
    assert sorted(one.keys()) == sorted({*two.keys(), numbered(99).key})


def test_a_file_written_within_the_same_clock_tick_is_found_at_the_next_refresh(
    tmp_path: Path,
) -> None:
    one, two = DiskTier(tmp_path, 10**6), DiskTier(tmp_path, 10**6)
    first, second = numbered(1), numbered(2)
    one.put(first)
    shard = file_of(one, first).parent
    before = shard.stat(), tmp_path.stat()
    assert seen(two) == {first.key}
    # The clock of the file system has not moved when the second one comes, to the same shard.
    data = codec.encode(make_chunk(range(2, 10)))
    (shard / f"{first.key[:2]}{second.key[2:]}.safetensors").write_bytes(data)
    for folder, time_of in zip((shard, tmp_path), before, strict=True):
        os.utime(folder, ns=(time_of.st_atime_ns, time_of.st_mtime_ns))
    seen(two)
    assert two.faults == {"corrupt": 1}  # it was looked at: its name is not its own


def test_leftovers_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    DiskTier(tmp_path, 10**6)
    (tmp_path / f"tmp-1-{0:032x}").write_bytes(b"half a chunk")
    tier = DiskTier(tmp_path, 10**6)
    assert not list(tmp_path.glob("tmp-*")) and tier.faults == {"leftover": 1}


def test_a_full_disk_is_a_counted_fault(tmp_path: Path, monkeypatch) -> None:
    tier = DiskTier(tmp_path, 10**6)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not tier.put(numbered(1))
    assert tier.faults == {"full": 1}
    assert not list(tmp_path.glob("tmp-*")) and tier.nbytes == 0
    assert tier.put(numbered(1))


def test_a_path_that_is_not_a_folder_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheFolderError, match="choose another one"):
        DiskTier(tmp_path / "file", 10**6)
    with pytest.raises(CacheFolderError, match="file/below"):
        DiskTier(tmp_path / "file" / "below", 10**6)


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from kvboost.cache.tiers.disk import DiskTier
from support.chunks import make_chunk
chunk = make_chunk(range(5))
os.setgid(65534); os.setuid(65534)
tier = DiskTier(Path(sys.argv[1]), 10**6)
(info,) = tier.refresh(now=True).added
assert tier.get(info.key) is not None
assert not tier.put(chunk)
tier.delete(info.key)
assert tier.contains(info.key)
print(sorted(tier.faults))
"""


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0,
    reason="only root can run a process as another user",
)
def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    DiskTier(folder, 10**6).put(numbered(1))
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in (tmp_path, *tmp_path.parents[:-1]):
        parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['undeleted', 'unwritable']"
