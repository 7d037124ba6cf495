"""Tokens per second with drafts, relative to without them.

Three tasks: code edits (a function of the standard library with one name changed), quotes
(questions about passages that are to be quoted) and free chat, which drafts nothing useful. Each
round answers the same prompts with ``speculate="off"`` and with ``speculate="auto"``, one after the
other, in an order that changes from round to round, for one user and for several at once. Prompts
are cached beforehand, answers are not kept, so no answer is drafted from an earlier one.

In 32-bit arithmetic the answers must have the same tokens. In 16 bits, rows that are computed
together round differently, so the answers that have the same tokens are counted, and tokens per
second are compared. Prints the medians of the rounds' ratios, by the clock and by the processor's
time, which other programs disturb less. The last line is JSON.

    python -m benchmarks speculation --model qwen2.5-coder-1.5b --rounds 3
    python -m benchmarks speculation --model FOLDER --device cuda --warm-rounds 1
    python -m benchmarks speculation --model qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b

With ``--device-memory 1GiB``, layers that do not fit are streamed to the GPU.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import inspect
import json
import random
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost import GenerationResult, KVBoost
from kvboost.bench.texts import edits

GOALS = {"code edit": 1.8, "quote": 1.3, "chat": 0.98}
Messages = list[dict[str, str]]

QUOTES: list[tuple[Any, str]] = [
    (heapq.merge, "Does merge read all of its inputs into memory?"),
    (textwrap.dedent, "How does dedent treat tabs and spaces?"),
    (statistics.median, "What does median return if the number of data points is even?"),
    (random.Random.sample, "How do I choose a sample from a range of integers?"),
    (textwrap.shorten, "What does shorten do to whitespace?"),
    (statistics.quantiles, "What are the methods inclusive and exclusive for?"),
    (bisect.insort_right, "Where is x inserted if it is already in the list?"),
    (shlex.shlex, "What is shlex?"),
]
PASSAGES = 3
"""Passages of a prompt that asks for a quote; the first has the answer."""
QUOTING = "You answer questions only with sentences from the given passages, copied word for word."
CHATS = [
    "Why do leaves turn red in autumn?",
    "Tell me a short story about a lighthouse keeper.",
    "What should I pack for a week in the mountains?",
    "Explain to a child how a bicycle stays upright.",
    "Give me advice for my first day at a new job.",
    "What makes bread rise?",
    "Describe a city that is built on water.",
    "How do I learn to play chess?",
]


def code_edit(number: int) -> Messages:
    return _ask(edits.code_edit(number).question)


def quote(number: int) -> Messages:
    some = [QUOTES[(number + more) % len(QUOTES)] for more in range(PASSAGES)]
    passages = "\n\n".join(
        f"[{at}] {inspect.getdoc(source)}" for at, (source, _) in enumerate(some, 1)
    )
    asked = f"Passages:\n\n{passages}\n\nQuestion: {some[0][1]}"
    return [{"role": "system", "content": QUOTING}, *_ask(asked)]


def chat(number: int) -> Messages:
    return _ask(CHATS[number % len(CHATS)])


def _ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]


TASKS: dict[str, Callable[[int], Messages]] = {"code edit": code_edit, "quote": quote, "chat": chat}


@dataclass(frozen=True)
class Run:
    """The answers to some prompts, asked at once."""

    results: list[GenerationResult]
    seconds: float
    cpu_seconds: float

    @property
    def tokens(self) -> list[list[int]]:
        return [result.token_ids for result in self.results]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def cpu_rate(self) -> float:
        return sum(map(len, self.tokens)) / self.cpu_seconds


def run(engine: KVBoost, prompts: Sequence[list[int]], count: int, speculate: str) -> Run:
    options: Any = {"keep": False, "speculate": speculate}
    began, cpu = time.perf_counter(), time.process_time()
    if len(prompts) == 1:
        results = [engine.generate(prompts[0], count, **options)]
    else:
        results = engine.generate_batch(prompts, count, **options)
    return Run(results, time.perf_counter() - began, time.process_time() - cpu)


def compare(engine: KVBoost, task: str, users: int, round: int, count: int) -> tuple[Run, Run]:
    """The same prompts without and with drafts."""
    first = round * users
    prompts = [engine.encode(TASKS[task](first + user)) for user in range(users)]
    for prompt in prompts:
        engine.warm(prompt)
    order = ("off", "auto") if round % 2 == 0 else ("auto", "off")
    runs = {how: run(engine, prompts, count, how) for how in order}
    off, auto = runs["off"], runs["auto"]
    if engine.dtype == torch.float32 and off.tokens != auto.tokens:
        raise SystemExit(f"{task}, {users} users, round {round}: drafts changed an answer")
    return off, auto


def measure(engine: KVBoost, task: str, users: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs one task; fails if a draft has changed an answer."""
    for round in range(chosen.warm_rounds):
        compare(engine, task, users, round, chosen.tokens)
    runs = [compare(engine, task, users, round, chosen.tokens) for round in range(chosen.rounds)]
    by_clock = [auto.rate / off.rate for off, auto in runs]
    by_cpu = [auto.cpu_rate / off.cpu_rate for off, auto in runs]
    answers = [both for off, auto in runs for both in zip(off.tokens, auto.tokens, strict=True)]
    results = [result for _, auto in runs for result in auto.results]
    return {
        "task": task,
        "users": users,
        "speedup": statistics.median(by_clock),
        "cpu_speedup": statistics.median(by_cpu),
        "speedups": by_clock,
        "cpu_speedups": by_cpu,
        "tokens_per_second": statistics.median(auto.rate for _, auto in runs),
        "tokens_per_second_without": statistics.median(off.rate for off, _ in runs),
        "answers": len(answers),
        "same_answers": sum(one == other for one, other in answers),
        "tokens": sum(len(other) for _, other in answers),
        "drafted_tokens": sum(result.drafted_tokens for result in results),
        "accepted_tokens": sum(result.accepted_tokens for result in results),
        "goal": GOALS[task],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--draft-model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-rounds", type=int, default=0, help="before those that count")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--threads", type=int, help="of torch; fewer on a machine that is shared")
    parser.add_argument("--device-memory", help="what the engine may take of the GPU's memory")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    names = ("device", "dtype", "draft_model", "device_memory")
    given = {name: getattr(chosen, name) for name in names}
    more: Any = {name: value for name, value in given.items() if value}
    with KVBoost.from_pretrained(chosen.model, **more) as engine:
        print(engine, flush=True)
        engine.generate(engine.encode(chat(0)), 8, keep=False)  # kernels, and the first costs
        found = []
        for users in chosen.users:
            for task in chosen.tasks:
                row = measure(engine, task, users, chosen)
                found.append(row)
                print(
                    f"{task:10} {users} users: {row['speedup']:.2f} x by the clock, "
                    f"{row['cpu_speedup']:.2f} x by the processor's time (goal {row['goal']}); "
                    f"{row['tokens_per_second']:.1f} tokens/s; "
                    f"{row['tokens']} tokens, {row['drafted_tokens']} drafted, "
                    f"{row['accepted_tokens']} accepted; "
                    f"{row['same_answers']} of {row['answers']} answers the same",
                    flush=True,
                )
        dtype, device = str(engine.dtype), str(engine.device)
    report = {"model": chosen.model, "dtype": dtype, "device": device, "rounds": chosen.rounds}
    print(json.dumps({**report, "tasks": found}))
