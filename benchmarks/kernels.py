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
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import IO

GOALS = {"decode step": 0.8, "moved text": 0.8, "reading": 1.0}
TOKENS = 2048
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of the text")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
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
    """A process that runs one task per line it reads and writes the seconds."""

    def __init__(self, options: argparse.Namespace, native: str) -> None:
        command = [sys.executable, "-m", "benchmarks", "kernels", "--worker"]
        command += [
            "--model",
            options.model,
            "--dtype",
            options.dtype,
            "--tokens",
            str(options.tokens),
        ]
        env = {**os.environ, "KVBOOST_NATIVE": native}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.kernels = self._read()

    def run(self, task: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(task + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended early with code {self._process.wait()}")
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(options: argparse.Namespace) -> None:
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write to the pipe
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
        answers.write(native.describe(getattr(torch, options.dtype)) + "\n")
        answers.flush()
        for line in sys.stdin:
            answers.write(f"{tasks[line.strip()]()}\n")
            answers.flush()
