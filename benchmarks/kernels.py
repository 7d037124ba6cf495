"""The gain of our kernels over our own torch path on this machine, in one run.

Two processes take turns, one with our kernels and one with ``KVBOOST_NATIVE=0``: each round, both
do the same work one after the other, so that a busy machine slows both. Three ratios of medians:
a decode step after 2,048 tokens, a request with moved text (time to first token), and reading a
prompt.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from benchmarks.entries import BENCHMARKS
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import ROUNDS, Bench, Report, option
from kvboost.bench.kit.goals import judge, keeps_to
from kvboost.bench.kit.tables import ms, table
from kvboost.bench.kit.timing import take_turns
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import KVBoostError
from kvboost.progress import Progress

MOST = {"decode step": 0.8, "moved text": 0.8, "reading": 1.0}
"""The most that each task may take of torch's time; in the order of the benchmark's goals."""
STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"rounds": 2, "tokens": 512}

    model: str = option(DEFAULT_MODEL, "A bundled name or a folder.")
    dtype: str = option("float32", "float32, bfloat16 or float16.")
    rounds: int = option(7, ROUNDS, least=1, most=50)
    tokens: int = option(2048, "Length of the text.", least=256)


def run(settings: Settings, bench: Bench) -> Report:
    workers = {"ours": Worker(settings, native="1"), "torch": Worker(settings, native="0")}
    bench.describe("cpu", settings.dtype, kernels=workers["ours"].kernels)
    total = len(MOST) * (settings.rounds + 1)
    times: dict[str, dict[str, float]] = {}
    try:
        with (
            Progress("two processes take turns") as progress,
            progress.step("rounds", total) as step,
        ):
            for task in MOST:
                timers = {name: partial(worker.run, task) for name, worker in workers.items()}
                found = take_turns(timers, settings.rounds, step.advance)
                times[task] = {name: sample.median_ms for name, sample in found.items()}
    finally:
        for worker in workers.values():
            worker.close()
    ratios = {task: each["ours"] / each["torch"] for task, each in times.items()}
    rows = [
        (task, ms(each["ours"]), ms(each["torch"]), f"{ratios[task]:.2f}")
        for task, each in times.items()
    ]
    return Report(
        {"ms": times, "ratios": ratios},
        [table(f"after {settings.tokens:,} tokens, ms", ("",), ("ours", "torch", "÷ torch"), rows)],
        judge(BENCHMARKS["kernels"].goals, [keeps_to(ratios[task], MOST[task]) for task in MOST]),
    )


class Worker:
    """A process that runs one task at a time."""

    def __init__(self, settings: Settings, native: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, native, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.kernels: str = self._answer()

    def run(self, task: str, _: int) -> float:
        """The milliseconds that it takes."""
        self._pipe.send(task)
        return float(self._answer()) * 1e3

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise KVBoostError(f"a worker ended with code {code}; its error is above") from None

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def work(pipe: Connection, native_allowed: str, settings: Settings) -> None:
    os.environ["KVBOOST_NATIVE"] = native_allowed
    import torch

    from kvboost import GenerationMode, KVBoost
    from kvboost.model import native

    engine = KVBoost.from_pretrained(
        settings.model, device="cpu", dtype=settings.dtype, reuse_moved="always"
    )
    lines = (f"Entry {n}: {n * 7919 % 9973} items at {n * 31 % 997} each.\n" for n in range(2048))
    text = engine.encode("".join(lines))[: settings.tokens]
    assert len(text) == settings.tokens, f"--tokens can be at most {len(text)}"
    half = settings.tokens // 2
    engine.warm(text)
    asked = 0

    def prompt_of(ids: list[int]) -> list[int]:
        """The text and a question that no prompt had before."""
        nonlocal asked
        asked += 1
        return [*ids, *engine.encode(f"Question {asked}: how many items are there?")]

    def decode() -> float:
        result = engine.generate(
            prompt_of(text), STEPS + 1, GenerationMode.PREFIX_CACHE, ignore_eos=True, keep=False
        )
        return result.timings.decode_ms / 1e3 / STEPS

    def moved() -> float:
        prompt = prompt_of(text[half:] + text[:half])
        result = engine.generate(prompt, 1, ignore_eos=True, keep=False)
        assert result.moved_tokens > half, "too little was moved"
        return result.timings.ttft_ms / 1e3

    def read() -> float:
        prompt = prompt_of(text)
        result = engine.generate(
            prompt,
            1,
            GenerationMode.PREFIX_CACHE,
            ignore_eos=True,
            keep=False,
            cache_salt=f"read {asked}",
        )
        assert result.cached_tokens == 0, "something was known"
        return result.timings.ttft_ms / 1e3

    tasks: dict[str, Callable[[], float]] = {
        "decode step": decode,
        "moved text": moved,
        "reading": read,
    }
    with engine:
        pipe.send(native.describe(getattr(torch, settings.dtype)))
        with suppress(EOFError):  # the parent has closed its end
            while True:
                pipe.send(tasks[pipe.recv()]())
