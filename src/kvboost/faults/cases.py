"""What is done to an engine, and what must hold then.

Each function is one kind of fault. It tries it a number of times and notes in its ``Case`` what it
saw. The model is a small random one in float32, so "the same answer" means the same tokens.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost import GenerationMode, KVBoost
from kvboost.cache.folder import CacheFolder
from kvboost.errors import KVBoostError
from kvboost.faults.workers import (
    ANSWER_TOKENS,
    PROMPTS,
    Writer,
    plain_answers,
    prompt,
    small_engine,
)

PREFIX = GenerationMode.PREFIX_CACHE
FOLDER_BYTES = 600_000
SMALL_DISK = 300_000
"""Both are less than the shared prompts need."""
SMALL_MEMORY = 100_000
"""Most chunks must be fetched again."""
FORK_SECONDS = 30
RECONNECT_SECONDS = 30
LONG_ANSWER = 300


class Unexpected(Exception):
    """Something that must hold did not."""


class NotHere(Exception):
    """This machine does not have what a case needs."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unexpected(otherwise)


@dataclass
class Case:
    """One kind of fault: how often it was tried, and what was seen where it did harm."""

    name: str
    on_trial: Callable[[], None] = lambda: None
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""
    """What an engine does about it, or why this was not tried."""

    @property
    def passed(self) -> int:
        return self.tried - len(self.failures)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """One attempt. An exception is a failure, and the next attempt follows."""
        try:
            yield
        except NotHere:
            raise
        except Exception as error:
            kind = "" if isinstance(error, Unexpected) else f"{type(error).__name__}: "
            self.failures.append(f"attempt {self.tried + 1}: {kind}{error}")
        self.tried += 1
        self.on_trial()

    def as_json(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "passed": self.passed,
            "failures": self.failures,
            "note": self.note,
        }


def check_answers(engine: KVBoost, expected: Sequence[list[int]]) -> int:
    """Raises unless every shared prompt gets its expected answer. Returns how many of the prompts'
    tokens came from the cache."""
    cached = 0
    for number, tokens in enumerate(expected):
        given = engine.generate(prompt(number), ANSWER_TOKENS, PREFIX)
        expect(given.token_ids == tokens, f"prompt {number}: {given.token_ids}, not {tokens}")
        cached += given.cached_tokens
    return cached


def check_books(engine: KVBoost) -> None:
    """Raises if the engine's books do not add up, or if an ended request still holds something.
    Nothing may run. What waits to be written is written first, since a chunk is in no tier for a
    moment when the writer hands it over."""
    engine.flush()
    problems = engine.check_integrity()
    in_use = engine.cache_stats()["in_use"]
    expect(not problems, "; ".join(problems))
    expect(in_use == 0, f"{in_use} chunks are still in use")


def check_folder(folder: Path) -> int:
    """Raises unless every chunk in ``folder`` is whole. Returns how many there are."""
    with redirect_stderr(io.StringIO()):  # its progress
        verdict = CacheFolder(folder).verify()
    expect(bool(verdict), f"{verdict.bad} bad chunks, {verdict.unreadable} unreadable ones")
    return verdict.ok


def check_size(folder: Path) -> None:
    """Raises if ``folder`` is empty or larger than its budget."""
    size = 0
    for path in [*folder.glob("??/*"), *folder.glob("tmp-*")]:
        with suppress(FileNotFoundError):  # evicted meanwhile
            size += path.stat().st_size
    expect(0 < size <= FOLDER_BYTES, f"{size} bytes in a folder of {FOLDER_BYTES}")


def disk_of(engine: KVBoost) -> dict[str, Any]:
    found: dict[str, Any] = engine.cache_stats()["tiers"]["disk"]
    return found


def killed_writers(case: Case, times: int, folder: Path) -> None:
    """Two processes write to one folder. At a random moment one of them is killed and started
    again: it must open the folder and answer, every chunk must be whole, and the folder within its
    budget. At the end both stop by themselves and no temporary files are left."""
    expected = plain_answers()
    job: dict[str, Any] = {
        "expected": expected,
        "disk_cache_dir": str(folder),
        "disk_cache_bytes": FOLDER_BYTES,
    }
    rng = random.Random(0)
    left = 0
    writers = [Writer(seed, **job) for seed in range(2)]
    try:
        for number in range(times):
            with case.trial():
                time.sleep(rng.uniform(0.005, 0.15))
                slot = rng.randrange(2)
                code = writers[slot].end(signal.SIGKILL)
                expect(code == -signal.SIGKILL, f"a writer ended by itself with code {code}")
                half_written = len(list(folder.glob(f"tmp-{writers[slot].pid}-*")))
                expect(half_written <= 1, f"{half_written} half-written files")
                left += half_written
                writers[slot] = Writer(2 + number, **job)
                check_folder(folder)
                check_size(folder)
        with case.trial():
            for writer in writers:
                code = writer.end(signal.SIGTERM)
                expect(code == 0, f"a writer ended with code {code}, see its traceback")
            check_size(folder)
            with small_engine(disk_cache_dir=folder) as engine:
                expect(check_answers(engine, expected) > 0, "nothing came from the folder")
                expect(disk_of(engine)["hits"] > 0, "nothing was read from the disk")
                check_books(engine)
            orphans = sorted(path.name for path in folder.glob("tmp-*"))
            expect(not orphans, f"temporary files are left: {orphans}")
            case.note = (
                f"{left} of {times} left a half-written file, which a later start removed; "
                f"{check_folder(folder)} chunks, all whole"
            )
    finally:
        for writer in writers:
            writer.end(signal.SIGKILL)


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


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + RECONNECT_SECONDS
    while not holds():
        expect(time.monotonic() < deadline, otherwise)
        time.sleep(0.05)


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


def forked_child(case: Case, times: int, folder: Path) -> None:
    """A process forks while its engine has threads. The child uses the engine: it gets the same
    answer or an error of ours, and never hangs. The parent goes on as before."""
    expected = plain_answers()
    with small_engine(disk_cache_dir=folder) as engine:
        engine.generate_batch([prompt(0), prompt(1)], ANSWER_TOKENS, PREFIX)
        ways: list[Callable[[], list[int]]] = [
            lambda: engine.generate(prompt(0), ANSWER_TOKENS, PREFIX).token_ids,
            lambda: engine.generate_batch([prompt(0)], ANSWER_TOKENS, PREFIX)[0].token_ids,
        ]
        for number in range(times):
            with case.trial():
                case.note = _in_a_fork(ways[number % len(ways)], expected[0])
                check_answers(engine, expected)
                check_books(engine)


def _in_a_fork(use: Callable[[], list[int]], expected: list[int]) -> str:
    """Runs ``use`` in a forked child and says how that ended."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send("works" if use() == expected else "a child gets another answer")
        except KVBoostError as error:
            theirs.send(f"refused: {error}")

    process = context.Process(target=child, daemon=True)
    with warnings.catch_warnings(), ours:  # that other threads run is what is tried here
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
        theirs.close()
        answered = ours.poll(FORK_SECONDS)
        process.kill()
        process.join()
        expect(answered, f"the child did not answer within {FORK_SECONDS} s")
        said: str = ours.recv()
    expect(said.startswith(("works", "refused")), said)
    return said


def interrupted(case: Case, times: int, folder: Path) -> None:
    """Ctrl-C arrives at a random moment of ``generate`` or ``generate_batch``. The call raises
    ``KeyboardInterrupt``, and the engine answers as before."""
    expected = plain_answers()
    rng = random.Random(0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it
    try:
        with small_engine(disk_cache_dir=folder) as engine:
            for number in range(times):
                with case.trial():
                    _interrupt(engine, number, rng.uniform(0.0, 0.3))
                    check_answers(engine, expected)
                    check_idle(engine)
    finally:
        signal.signal(signal.SIGINT, before)
    case.note = "KeyboardInterrupt is raised; later answers are the same"


def _interrupt(engine: KVBoost, number: int, seconds: float) -> None:
    """Answers until Ctrl-C arrives, which it does after ``seconds``."""
    texts = [prompt(100 + number), prompt(number % PROMPTS)]
    deadline = time.monotonic() + RECONNECT_SECONDS
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while time.monotonic() < deadline:
            if number % 2:
                engine.generate_batch(texts, LONG_ANSWER, ignore_eos=True)
            else:
                engine.generate(texts[0], LONG_ANSWER, ignore_eos=True)
        raise Unexpected("Ctrl-C ended no answer")
    except KeyboardInterrupt:
        timer.join()


def check_idle(engine: KVBoost) -> None:
    """Raises if a request still runs, or if the books do not add up."""
    wait_until(lambda: engine.serving_stats()["running"] == 0, "a request still runs")
    check_books(engine)


def joins_and_cancels(case: Case, times: int, folder: Path) -> None:
    """Requests join at random moments, and a third of them is cancelled at random moments. The
    others get the answers that they get alone."""
    rng = random.Random(0)
    lengths = [rng.randrange(1, 40) for _ in range(times)]
    with small_engine() as engine:
        alone = [
            engine.generate(
                prompt(number % 30), length, GenerationMode.BASELINE, ignore_eos=True
            ).token_ids
            for number, length in enumerate(lengths)
        ]

    async def ask(engine: KVBoost, number: int) -> None:
        moment, cancelled = rng.uniform(0, times / 60), rng.random() < 1 / 3
        stay = rng.uniform(0, 0.3)
        await asyncio.sleep(moment)
        with case.trial():
            mode = (GenerationMode.BASELINE, PREFIX)[number % 2]
            text = prompt(number % 30)
            async with engine.astream(text, lengths[number], mode, ignore_eos=True) as stream:
                if cancelled:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(_read(stream), stay)
                    return
                await _read(stream)
            given = stream.result.token_ids
            expect(given == alone[number], f"request {number}: {given}, not {alone[number]}")

    async def ask_all(engine: KVBoost) -> None:
        await asyncio.gather(*(ask(engine, number) for number in range(times)))

    with small_engine(disk_cache_dir=folder, max_waiting=times) as engine:
        asyncio.run(ask_all(engine))
        check_idle(engine)


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass
