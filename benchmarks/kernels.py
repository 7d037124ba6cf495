"""The gain of our kernels over our own torch path on this machine, in one run.

Two processes take turns, one with our kernels and one with ``KVBOOST_NATIVE=0``: each round, both
do the same work one after the other, so that a busy machine slows both. Three ratios of medians:
a decode step after 2,048 tokens, a request with moved text (time to first token), and reading a
prompt. The last line is JSON.

    python -m benchmarks kernels [--model smollm2-135m] [--dtype float32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

GOALS = {"decode step": 0.8, "moved text": 0.8, "reading": 1.0}
TOKENS = 2048
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of the text")
    options = parser.parse_args()
    workers = {"ours": Worker(options, native="1"), "torch": Worker(options, native="0")}
    times: dict[str, dict[str, list[float]]] = {task: {} for task in GOALS}
    try:
        for number in range(options.rounds + 1):  # the first one warms up
            for task in GOALS:
                for name, worker in workers.items():
                    seconds = worker.run(task)
                    if number:
                        times[task].setdefault(name, []).append(seconds)
                        print(f"{number} {task:12} {name:6} {seconds * 1e3:9.1f} ms", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    report: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "kernels": workers["ours"].kernels,
        "model": options.model,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    for task, goal in GOALS.items():
        ours, torchs = (statistics.median(times[task][name]) for name in ("ours", "torch"))
        ratio = ours / torchs
        print(f"{task}: {ratio:.2f} x torch's time; the goal is at most {goal}")
        report[task] = {
            "ours_ms": round(ours * 1e3, 2),
            "torch_ms": round(torchs * 1e3, 2),
            "ratio": round(ratio, 3),
            "goal": goal,
            "reached": ratio <= goal,
        }
    print(json.dumps(report))


class Worker:
    """A process that runs one task at a time."""

    def __init__(self, options: argparse.Namespace, native: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, native, options), daemon=True)
        self._process.start()
        theirs.close()
        self.kernels: str = self._pipe.recv()

    def run(self, task: str) -> float:
        """The seconds that it takes; raises ``EOFError`` if the process has ended."""
        self._pipe.send(task)
        seconds: float = self._pipe.recv()
        return seconds

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def work(pipe: Connection, native_allowed: str, options: argparse.Namespace) -> None:
    os.environ["KVBOOST_NATIVE"] = native_allowed
    import torch

    from kvboost import GenerationMode, KVBoost
    from kvboost.model import native

    engine = KVBoost.from_pretrained(
        options.model, device="cpu", dtype=options.dtype, reuse_moved="always"
    )
    lines = (f"Entry {n}: {n * 7919 % 9973} items at {n * 31 % 997} each.\n" for n in range(2048))
    text = engine.encode("".join(lines))[: options.tokens]
    assert len(text) == options.tokens, f"--tokens can be at most {len(text)}"
    half = options.tokens // 2
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
        pipe.send(native.describe(getattr(torch, options.dtype)))
        with suppress(EOFError):  # the parent has closed its end
            while True:
                pipe.send(tasks[pipe.recv()]())
