"""One kind of fault, and what must hold when it is tried."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.workers import ANSWER_TOKENS, prompt
from kvboost import GenerationMode, KVBoost
from kvboost.cache.folder import CacheFolder

PREFIX = GenerationMode.PREFIX_CACHE
MOST_SECONDS = 30
"""The most seconds to wait for something that must happen."""


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
    """The engine's reaction, or why this was not tried."""

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


def disk_of(engine: KVBoost) -> dict[str, Any]:
    found: dict[str, Any] = engine.cache_stats()["tiers"]["disk"]
    return found


def check_idle(engine: KVBoost) -> None:
    """Raises if a request still runs, or if the books do not add up."""
    wait_until(lambda: engine.serving_stats()["running"] == 0, "a request still runs")
    check_books(engine)


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not holds():
        expect(time.monotonic() < deadline, otherwise)
        time.sleep(0.05)
