"""What goes wrong on disks, networks and clocks: the answers stay those of a plain prefill, a
counter moves, and nothing is raised."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvboost import GenerationMode, KVBoost
from kvboost.cache import codec
from kvboost.cache.tiers import writer as writer_module
from redis_server import MISSING, RedisServer
from tiny import make_engine, tiny_model
from zygote import prompt

PREFIX = GenerationMode.PREFIX_CACHE


@pytest.fixture(autouse=True)
def one_core() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def answers() -> dict[int, list[int]]:
    with make_engine(tiny_model("llama")) as engine:
        return {
            number: engine.generate(prompt(number), 4, GenerationMode.BASELINE).token_ids
            for number in range(12)
        }


def check_answers(engine: KVBoost, answers: dict[int, list[int]]) -> int:
    """How many prompt tokens came from the cache; every answer must be the plain one."""
    reused = 0
    for number, expected in answers.items():
        result = engine.generate(prompt(number), 4, PREFIX)
        assert result.token_ids == expected
        reused += result.cached_tokens
    return reused


def disk_faults(engine: KVBoost) -> dict[str, int]:
    return engine.cache_stats()["tiers"]["disk"]["faults"]


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


class Zygote:
    def __init__(self) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, str(here.parent / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parent.parent / "src")])},
        )

    def begin(self, **job: object) -> None:
        self.tell(job)

    def tell(self, job: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def hear(self) -> list[int]:
        assert self._process.stdout is not None
        return [int(word) for word in self._process.stdout.readline().split()]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def test_fifty_kills_in_the_middle_of_writes(zygote, open_engine, answers, tmp_path) -> None:
    folder = tmp_path / "kv"
    rng = random.Random(0)
    left_behind = 0
    for seed in range(50):
        # A small budget, so that files are removed and written again all the time.
        zygote.begin(
            seed=seed, seconds=60, folder=str(folder), prompts=12, disk_cache_bytes=600_000
        )
        (pid,) = zygote.hear()
        time.sleep(rng.uniform(0.005, 0.08))
        os.kill(pid, signal.SIGKILL)
        zygote.tell({"wait": True})
        assert zygote.hear() == [pid, signal.SIGKILL]
        orphans = list(folder.glob("tmp-*"))
        assert len(orphans) <= 1
        left_behind += len(orphans)
    assert left_behind > 0  # some were killed in the middle of one
    files = chunk_files(folder)
    assert files and sum(path.stat().st_size for path in files) <= 600_000
    for path in files:
        assert codec.read_file(path).key == path.stem  # every one is whole
    (folder / f"tmp-0-{0:032x}").write_bytes(b"the fifty-first")
    engine = open_engine()
    assert not list(folder.glob("tmp-*"))
    assert check_answers(engine, answers) > 0
    assert engine.cache_stats()["tiers"]["disk"]["hits"] > 0
    assert set(disk_faults(engine)) == {"leftover"}
    assert engine._runtime.store.check_integrity() == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "vanish", "foreign"])
def test_damaged_files(damage, open_engine, answers, tmp_path) -> None:
    """Ten places each in twenty rounds: 200 flipped bits, and as many of the others."""
    folder, pristine = tmp_path / "kv", tmp_path / "pristine"
    first = open_engine()
    check_answers(first, answers)
    first.close()
    shutil.copytree(folder, pristine)
    rng = random.Random(1)
    faults = reused = 0
    for _ in range(20 if damage == "flip" else 4):
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
        engine = open_engine()
        engine.plan([1])  # the folder is scanned
        for path in rng.sample(chunk_files(folder), 10):
            data = bytearray(path.read_bytes())
            if damage == "flip":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            elif damage == "truncate":
                path.write_bytes(data[: rng.randrange(len(data))])
            elif damage == "foreign":
                path.write_bytes(rng.randbytes(len(data)))
            else:
                path.unlink()
        reused += check_answers(engine, answers)
        faults += sum(disk_faults(engine).values())
        assert set(disk_faults(engine)) <= {"corrupt", "vanished"}
        assert engine._runtime.store.check_integrity() == []
        engine.close()
    assert faults >= (20 if damage == "flip" else 4) and reused > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size."""
    if shutil.which("mount") is None or os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "mounted"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


def test_a_full_disk(open_engine, answers, small_disk, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "COLD_SECONDS", 0.0)
    engine = open_engine(disk_cache_dir=small_disk("size=300k") / "kv")
    check_answers(engine, answers)
    engine.flush()
    assert disk_faults(engine)["full"] > 0
    assert not list(engine.config.disk_cache_dir.glob("tmp-*"))
    assert check_answers(engine, answers) > 0  # from memory
    engine.close()
    again = open_engine(disk_cache_dir=engine.config.disk_cache_dir)
    assert check_answers(again, answers) > 0  # what was written is whole
    assert again.cache_stats()["tiers"]["disk"]["hits"] > 0


def test_a_folder_that_becomes_read_only(open_engine, answers, small_disk) -> None:
    place = small_disk("size=8m")
    first = open_engine(disk_cache_dir=place / "kv")
    check_answers(first, answers)
    first.close()
    remount = ["mount", "-o", "remount,ro", str(place)]
    assert subprocess.run(remount, check=False).returncode == 0
    engine = open_engine(disk_cache_dir=place / "kv")
    assert check_answers(engine, answers) > 0
    assert engine.cache_stats()["tiers"]["disk"]["hits"] > 0
    engine.generate("something new, which cannot be written", 4)
    engine.flush()
    assert disk_faults(engine)["unwritable"] > 0


def test_two_processes_write_the_same_chunks_for_half_a_minute(
    zygote, open_engine, answers, tmp_path
) -> None:
    folder = tmp_path / "kv"
    budget = 700_000
    for seed in (1, 2):
        zygote.begin(
            seed=seed,
            seconds=30,
            folder=str(folder),
            prompts=12,
            disk_cache_bytes=budget,
            max_cache_bytes=300_000,
        )
    pids = {zygote.hear()[0], zygote.hear()[0]}
    end = time.monotonic() + 29
    most = 0
    while time.monotonic() < end:
        total = 0
        for path in [*chunk_files(folder), *folder.glob("tmp-*")]:
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        most = max(most, total)
        time.sleep(0.02)
    zygote.tell({"wait": True})
    assert {tuple(zygote.hear()), tuple(zygote.hear())} == {(pid, 0) for pid in pids}
    assert 0 < most <= budget
    assert not list(folder.glob("tmp-*")) and not (folder / "quarantine").exists()
    for path in chunk_files(folder):
        assert codec.read_file(path).key == path.stem
    engine = open_engine()
    assert check_answers(engine, answers) > 0 and disk_faults(engine) == {}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_remote_server_that_is_stopped_and_restarted(open_engine, answers, tmp_path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        writer = open_engine(disk_cache_dir=None, remote_cache_url=server.url)
        check_answers(writer, answers)
        writer.flush()
        reader = open_engine(
            disk_cache_dir=None, remote_cache_url=server.url, max_cache_bytes=100_000
        )
        assert check_answers(reader, answers) > 0
        hits = reader.cache_stats()["tiers"]["remote"]["hits"]
        assert hits > 0
        server.stop()
        assert check_answers(reader, answers) >= 0
        far = reader.cache_stats()["tiers"]["remote"]
        assert far["faults"]["unreachable"] > 0 and far["state"] == "open"
        server.start()
        check_answers(writer, answers)
        writer.close()
        deadline = time.monotonic() + 20
        while reader.cache_stats()["tiers"]["remote"]["state"] != "closed":
            assert time.monotonic() < deadline
            check_answers(reader, answers)
            time.sleep(0.1)
        fresh = open_engine(disk_cache_dir=None, remote_cache_url=server.url)
        check_answers(reader, answers)
        reader.flush()
        assert check_answers(fresh, answers) > 0
        assert fresh.cache_stats()["tiers"]["remote"]["hits"] > 0
    finally:
        server.close()


def test_a_clock_that_jumps(open_engine, answers, tmp_path, monkeypatch) -> None:
    first = open_engine()
    check_answers(first, answers)
    first.close()
    rng = random.Random(2)
    for path in chunk_files(tmp_path / "kv"):
        day = rng.choice([0, 10**9, 2 * 10**9, 2**32])
        os.utime(path, (day, day))
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 * (-1) ** next(jumps))
    engine = open_engine(disk_cache_bytes=500_000, max_cache_bytes=300_000)
    for _ in range(2):
        assert check_answers(engine, answers) > 0
        engine.flush()
    stats = engine.cache_stats()
    assert stats["tiers"]["disk"]["hits"] > 0 and stats["evicted"] > 0
    assert stats["tiers"]["disk"]["faults"] == {}
    assert engine._runtime.store.check_integrity() == []
