"""Looking at a folder: what it costs, and what other threads may do meanwhile."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.quantize import KVFormat
from kvboost.cache.tiers import disk
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.quarantine import MOST_QUARANTINED
from support.chunks import make_chunk
from support.planting import OTHER_VERSIONS, chunk_files, plant

SHARD = "ab"
WHOLE = codec.encode(make_chunk(range(8)))
BOMB = b'{"__metadata__":{"format":"kvboost-chunk-1","tokens":[' + b"[]," * 300_000 + b"[]]}}"


def sized(length: int, content: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + content


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "cut off in its length": WHOLE[:5],
    "cut off in its header": WHOLE[:100],
    "zeros": bytes(9000),
    "text": b"hello" * 2000,
    "a header of 2**63 bytes": sized(1 << 63, WHOLE[8:]),
    "a header of 16 MB of zeros": sized(1 << 24, bytes(1 << 20)),
    "a header of 16 MB that begins well": sized(1 << 24, WHOLE[8:500] + bytes(1 << 20)),
    "deep": sized(8000, b'{"__metadata__":{"a":' + b"[" * 8000),
}


def name(number: int) -> str:
    return f"{SHARD}{number:030x}.safetensors"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts calls that touch a file, and the bytes that are read."""
    counts: Counter[str] = Counter()

    def counting(call: str, real: Callable[..., object]) -> Callable[..., object]:
        def counted_call(*args: object, **kwargs: object) -> object:
            counts[call] += 1
            answer = real(*args, **kwargs)
            counts["bytes"] += len(answer) if isinstance(answer, bytes) else 0
            return answer

        return counted_call

    with pytest.MonkeyPatch.context() as patch:
        for call in ("open", "read", "stat", "lstat", "fstat", "rename", "unlink", "scandir"):
            patch.setattr(os, call, counting(call, getattr(os, call)))
        yield counts


def start(folder: Path) -> tuple[DiskTier, Counter[str]]:
    with counted() as counts:
        tier = DiskTier(folder, 10**9)
        tier.refresh(now=True)
    return tier, counts


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    made = DiskTier(tmp_path / "kv", 10**9).folder / SHARD
    made.mkdir()
    (tmp_path / "kv" / "quarantine").mkdir()
    return made


def test_names_that_are_not_ours_cost_no_call(shard: Path) -> None:
    _, before = start(shard.parent)
    for number in range(300):
        (shard / f"junk-{number}").write_bytes(WHOLE)
        (shard / f"{number:032x}.safetensors").write_bytes(WHOLE)  # belongs into another folder
        (shard.parent / "quarantine" / f"junk-{number}").write_bytes(WHOLE)
    tier, after = start(shard.parent)
    assert after == before
    assert tier.faults == {} and len(list(shard.iterdir())) == 600


def test_what_is_not_a_file_costs_no_call(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shard)  # the path of a socket must be short
    _, before = start(shard.parent)
    for number in range(100):
        os.mkfifo(shard / name(4 * number))
        (shard / name(4 * number + 1)).mkdir()
        (shard / name(4 * number + 2)).symlink_to("/etc/hosts")
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name(4 * number + 3))
    tier, after = start(shard.parent)
    assert after == before
    assert tier.faults == {"foreign": 400} and len(list(shard.iterdir())) == 400


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_costs_one_small_read(kind: str, shard: Path) -> None:
    """Of many in one folder only the last few are kept, and not one is moved twice."""
    count = MOST_QUARANTINED + 50
    for number in range(count):
        (shard / name(number)).write_bytes(DAMAGED[kind])
    _, nothing = start(shard.parent.parent / "empty")
    tier, counts = start(shard.parent)
    assert tier.faults == {"corrupt": count}
    assert counts["read"] == count and counts["bytes"] <= count * codec.HEADER_BYTES
    assert counts["open"] - nothing["open"] <= count + 10
    assert counts["rename"] == MOST_QUARANTINED and counts["unlink"] == count - MOST_QUARANTINED
    assert len(tier.quarantined()) == MOST_QUARANTINED and not list(shard.iterdir())


def test_a_header_of_many_small_values_is_not_parsed(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard / name(1)).write_bytes(sized(len(BOMB), BOMB))

    def parsed(*_: object) -> None:
        pytest.fail("the header was parsed")

    monkeypatch.setattr(codec.json, "loads", parsed)
    tier, _ = start(shard.parent)
    assert tier.faults == {"corrupt": 1}


def test_a_crowded_quarantine_is_cut_down_at_the_start(shard: Path) -> None:
    aside = shard.parent / "quarantine"
    for number in range(MOST_QUARANTINED + 100):
        (aside / name(number)).write_bytes(bytes(10))
    tier, _ = start(shard.parent)
    assert len(list(aside.iterdir())) == MOST_QUARANTINED
    assert tier.nbytes == 10 * MOST_QUARANTINED


def test_leftovers_are_removed_with_one_call_each(shard: Path) -> None:
    _, before = start(shard.parent)
    for number in range(200):
        (shard.parent / f"tmp-{number}-{number:032x}").write_bytes(b"half")
    tier, after = start(shard.parent)
    assert tier.faults == {"leftover": 200}
    assert after - before == Counter(unlink=200)


def in_shard(number: int, folder: str) -> KVChunk:
    """Some chunk that belongs into ``folder``."""
    return next(
        chunk
        for first in range(number, 1 << 20, 7)
        if (chunk := make_chunk(range(first, first + 4))).key.startswith(folder)
    )


@pytest.fixture
def stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DiskTier, KVChunk, threading.Event, threading.Thread]]:
    """A tier that looks at a folder on a slow disk: it reads the header of a chunk that another
    process has written, for as long as the event is not set."""
    tier, known = DiskTier(tmp_path / "kv", 10**9), make_chunk(range(8))
    other = in_shard(0, known.key[:2])
    DiskTier(tmp_path / "kv", 10**9).put(other)
    tier.put(known)
    reading, go_on, read = threading.Event(), threading.Event(), disk.read_headers

    def read_slowly(*args: object) -> object:
        headers = read(*args)
        reading.set()
        go_on.wait(60)
        return headers

    monkeypatch.setattr(disk, "read_headers", read_slowly)
    look = threading.Thread(target=lambda: tier.refresh(now=True), daemon=True)
    look.start()
    assert reading.wait(60)
    yield tier, other, go_on, look
    go_on.set()
    look.join()


def test_quick_calls_do_not_wait_for_a_look(stalled, tmp_path: Path) -> None:
    """The store makes them with its lock held, so every request would wait."""
    tier, _, go_on, _ = stalled
    known, done = make_chunk(range(8)), threading.Event()

    def calls() -> None:
        assert tier.contains(known.key) and tier.keys() == [known.key]
        assert tier.nbytes and tier.faults == {}
        assert tier.refresh().added == ()  # another thread looks
        tier.get(known.key)
        assert tier.put(make_chunk(range(3)))
        tier.delete(known.key)
        tier.drop_unread(1)
        tier.clear_quarantine()
        done.set()

    threading.Thread(target=calls, daemon=True).start()
    assert done.wait(60) and not go_on.is_set()


def test_what_threads_put_and_delete_during_a_look_stays_so(stalled) -> None:
    tier, other, go_on, look = stalled
    known = make_chunk(range(8))
    new = in_shard(1000, known.key[:2])
    assert tier.put(new)
    tier.delete(known.key)
    tier.delete(other.key)  # whose header the look has just read
    go_on.set()
    look.join()
    assert tier.keys() == [new.key]
    assert tier.nbytes == len(codec.encode(new))


FAILING: dict[str, tuple[str, str]] = {
    "the cache folder": ("scandir", "kv"),
    "a folder in it": ("scandir", SHARD),
    "a file": ("open", ".safetensors"),
}


@pytest.mark.parametrize("what", FAILING)
def test_what_could_not_be_read_is_looked_at_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it failed, and though nothing changes. What can be read is found meanwhile."""
    folder, bad, good = tmp_path / "kv", in_shard(0, SHARD), in_shard(0, "cd")
    writing = DiskTier(folder, 10**9)
    assert writing.put(bad) and writing.put(good)
    (call, end), real = FAILING[what], getattr(os, FAILING[what][0])

    def failing(path: object, *args: object, **kwargs: object) -> object:
        if str(path).endswith(end) and not str(path).startswith("cd"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args, **kwargs)

    tier = DiskTier(folder, 10**9)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        found = [info.key for _ in range(4) for info in tier.refresh(now=True).added]
    assert found == ([] if what == "the cache folder" else [good.key])
    assert tier.faults == {"unreadable": 4}
    assert bad.key in {info.key for info in tier.refresh(now=True).added}


def test_a_chunk_of_another_version_that_vanishes_during_a_look_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = DiskTier(tmp_path, 10**9)
    for number in range(5):
        writing.put(in_shard(10_000 * number, SHARD))
    _, *ours = files = chunk_files(tmp_path)
    assert len(ours) == 4
    theirs = plant(files[0], **OTHER_VERSIONS["a newer format"])
    read = codec.info

    def vanishing(*args: Any) -> object:
        try:
            return read(*args)
        except codec.OtherVersion:
            theirs.unlink()
            raise

    monkeypatch.setattr(codec, "info", vanishing)
    tier = DiskTier(tmp_path, 10**9)
    assert {info.key for info in tier.refresh(now=True).added} == {path.stem for path in ours}
    assert tier.faults == {"version": 1}
    tier.refresh(now=True)
    assert tier.others() == {}


def test_a_file_larger_than_its_chunk_can_be_is_not_read(tmp_path: Path, monkeypatch) -> None:
    tier, chunk = DiskTier(tmp_path, 10**9), make_chunk(range(8))
    tier.put(chunk)
    path = tmp_path / chunk.key[:2] / f"{chunk.key}.safetensors"
    os.truncate(path, 1 << 30)
    expected = codec.Expected(chunk.info, KVFormat(2, 1, 4, torch.float32))

    def read(*_: object) -> None:
        pytest.fail("the file was read")

    monkeypatch.setattr(codec, "read_file", read)
    assert tier.get(chunk.key, expected) is None
    assert tier.faults == {"corrupt": 1} and not path.exists()
