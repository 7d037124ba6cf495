"""Faults of disks and servers that chunks are on.

Each function is one kind of fault. It tries it a number of times and notes in its ``Case`` what it
saw. The model is a small random one in float32, so "the same answer" means the same tokens.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.case import (
    Case,
    NotHere,
    check_answers,
    check_books,
    check_folder,
    disk_of,
    expect,
    wait_until,
)
from benchmarks.faults.workers import ANSWER_TOKENS, Writer, plain_answers, prompt, small_engine

FOLDER_BYTES = 600_000
SMALL_DISK = 300_000
"""Both are less than the shared prompts need."""
SMALL_MEMORY = 100_000
"""Most chunks must be fetched again."""


def check_size(folder: Path) -> None:
    """Raises if ``folder`` is empty or larger than its budget."""
    size = 0
    for path in [*folder.glob("??/*"), *folder.glob("tmp-*")]:
        with suppress(FileNotFoundError):  # evicted meanwhile
            size += path.stat().st_size
    expect(0 < size <= FOLDER_BYTES, f"{size} bytes in a folder of {FOLDER_BYTES}")


def killed_writers(case: Case, times: int, folder: Path) -> None:
    """Two processes write to one folder, in turns. At a random moment one of them is killed, or
    both. Then a reader starts: every chunk must be whole, the answers the same, the folder within
    its budget, its lock free, and nothing half-written left of the dead. The killed ones start
    again. At the end both stop by themselves."""
    expected = plain_answers()
    job: dict[str, Any] = {
        "expected": expected,
        "disk_cache_dir": str(folder),
        "disk_cache_bytes": FOLDER_BYTES,
    }
    rng = random.Random(0)
    left = kills = hits = 0
    writers = [Writer(seed, **job) for seed in range(2)]
    try:
        for number in range(times):
            with case.trial():
                time.sleep(rng.uniform(0.005, 0.15))
                slots = rng.choice([[0], [1], [0, 1]])
                for slot in slots:
                    code = writers[slot].end(signal.SIGKILL)
                    expect(code == -signal.SIGKILL, f"a writer ended by itself with code {code}")
                dead = [writers[slot].pid for slot in slots]
                kills += len(dead)
                for process in dead:
                    half_written = len(_half_written(folder, [process]))
                    expect(half_written <= 1, f"{half_written} half-written files of one writer")
                    left += half_written
                hits += _read_after(folder, expected, dead)
                for slot in slots:
                    writers[slot] = Writer(2 + 2 * number + slot, **job)
                check_size(folder)
        with case.trial():
            for writer in writers:
                code = writer.end(signal.SIGTERM)
                expect(code == 0, f"a writer ended with code {code}, see its traceback")
            check_size(folder)
            expect(_read_after(folder, expected, []) > 0, "nothing was read from the disk")
            orphans = sorted(path.name for path in folder.glob("tmp-*"))
            expect(not orphans, f"temporary files are left: {orphans}")
            case.note = (
                f"{left} of {kills} killed writers left a half-written file, which the next start "
                f"removed; readers read {hits:,} chunks from disk; {check_folder(folder)} chunks "
                "at the end, all whole"
            )
    finally:
        for writer in writers:
            writer.end(signal.SIGKILL)


def _half_written(folder: Path, processes: Sequence[int]) -> list[Path]:
    return [path for process in processes for path in folder.glob(f"tmp-{process}-*")]


def _read_after(folder: Path, expected: Sequence[list[int]], dead: Sequence[int]) -> int:
    """Starts a reader over a folder whose writers are ``dead`` and raises unless everything is as
    it must be. Returns how many chunks it read from the disk."""
    with small_engine(disk_cache_dir=folder, disk_cache_bytes=FOLDER_BYTES) as engine:
        orphans = _half_written(folder, dead)
        expect(not orphans, f"the start left half-written files: {orphans}")
        check_answers(engine, expected)
        check_books(engine)
        disk = disk_of(engine)
        # Another writer may evict what the reader has just found. A held lock would be a fault.
        harmless = {"leftover", "vanished"}
        expect(disk["faults"].keys() <= harmless, f"the reader met {disk['faults']}")
    check_folder(folder)
    return int(disk["hits"])


@contextmanager
def mounted(place: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes at ``place``."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.getuid() != 0 or shutil.which("mount") is None:
        raise NotHere("mounting a small file system needs root")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"this machine does not let us mount: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)  # even if a file is open


def full_disk(case: Case, times: int, folder: Path) -> None:
    """The disk fills up while chunks are written. Without root, files may not grow beyond a few
    kilobytes instead, which the system reports in the same way."""
    expected = plain_answers()
    for number in range(times):
        with case.trial():
            if os.getuid() == 0:
                with mounted(folder / f"{number}", SMALL_DISK) as place:
                    _fill(place / "kv", expected)
                    with small_engine(disk_cache_dir=place / "kv") as engine:
                        check_answers(engine, expected)
                        expect(disk_of(engine)["hits"] > 0, "nothing written could be read")
            else:
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
                try:
                    _fill(folder / f"{number}", expected)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    case.note = "what does not fit stays in memory and is counted as a fault"


def _fill(folder: Path, expected: Sequence[list[int]]) -> None:
    with small_engine(disk_cache_dir=folder) as engine:
        check_answers(engine, expected)
        engine.flush()
        faults = disk_of(engine)["faults"]
        expect(faults.get("full", 0) > 0, f"a full disk was not noticed: {faults}")
        expect(not list(folder.glob("tmp-*")), "temporary files are left")
        expect(check_answers(engine, expected) > 0, "nothing came from memory")
        check_books(engine)


def read_only_folder(case: Case, times: int, folder: Path) -> None:
    """The folder becomes read-only between two starts: it still serves, and nothing is raised."""
    expected = plain_answers()
    for number in range(times):
        with case.trial():
            place = folder / f"{number}"
            if os.getuid() == 0:
                with mounted(place, 1 << 23):
                    _read_only(place, expected, ["mount", "-o", "remount,ro", str(place)])
            else:
                _read_only(place, expected, ["chmod", "-R", "a-w", str(place)])
                subprocess.run(["chmod", "-R", "u+w", str(place)], check=True)
    case.note = "chunks are read; those that cannot be written are counted as faults"


def _read_only(place: Path, expected: Sequence[list[int]], close: Sequence[str]) -> None:
    with small_engine(disk_cache_dir=place / "kv") as engine:
        check_answers(engine, expected)
    subprocess.run(close, check=True)
    with small_engine(disk_cache_dir=place / "kv") as engine:
        check_answers(engine, expected)
        expect(disk_of(engine)["hits"] > 0, "nothing was read from the disk")
        engine.generate(prompt(len(expected) + 9), ANSWER_TOKENS)
        engine.flush()
        faults = disk_of(engine)["faults"]
        expect(faults.get("unwritable", 0) > 0, f"a read-only folder was not noticed: {faults}")
        check_books(engine)


class Redis:
    """A server of our own on a socket in ``folder``. It keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            raise NotHere("redis-server is not installed")
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        options = f"--port 0 --unixsocket {self._socket} --save  --appendonly no"
        command = ["redis-server", *options.split(" "), "--dir", str(self._socket.parent)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._socket.exists, "redis-server does not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def killed_redis(case: Case, times: int, folder: Path) -> None:
    """Redis is killed while chunks are fetched from it, and comes back empty. Every answer stays
    the same, the engine connects again by itself, and what it writes then serves other engines."""
    expected = plain_answers()
    rng = random.Random(0)
    folder.mkdir(parents=True)
    server = Redis(folder)
    server.start()
    try:
        with small_engine(remote_cache_url=server.url, max_cache_bytes=SMALL_MEMORY) as engine:

            def remote() -> dict[str, Any]:
                found: dict[str, Any] = engine.cache_stats()["tiers"]["remote"]
                return found

            def unreachable() -> int:
                return int(remote()["faults"].get("unreachable", 0))

            def is_back() -> bool:
                check_answers(engine, expected)
                return bool(remote()["state"] == "closed")

            for _ in range(times):
                with case.trial():
                    check_answers(engine, expected)
                    engine.flush()
                    hits, faults = remote()["hits"], unreachable()
                    killer = threading.Timer(rng.uniform(0.0, 0.2), server.kill)
                    killer.start()
                    while killer.is_alive():
                        check_answers(engine, expected)
                    killer.join()
                    expect(remote()["hits"] > hits, "nothing came from Redis before it was killed")
                    check_answers(engine, expected)
                    expect(unreachable() > faults, "its death was not noticed")
                    server.start()
                    wait_until(is_back, "Redis is back, but the engine does not connect again")
                    check_answers(engine, expected)
                    check_books(engine)
                    with small_engine(remote_cache_url=server.url) as other:
                        check_answers(other, expected)
                        served = other.cache_stats()["tiers"]["remote"]["hits"]
                        expect(served > 0, "nothing came from Redis after it was back")
    finally:
        server.kill()
    case.note = "chunks it held are read anew; the engine connects again by itself"
