"""Faults of a process and of requests while an engine answers.

Each function is one kind of fault. It tries it a number of times and notes in its ``Case`` what it
saw. The model is a small random one in float32, so "the same answer" means the same tokens.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.case import (
    MOST_SECONDS,
    PREFIX,
    Case,
    Unexpected,
    check_answers,
    check_books,
    check_idle,
    expect,
)
from benchmarks.faults.workers import ANSWER_TOKENS, PROMPTS, plain_answers, prompt, small_engine
from kvboost import GenerationMode, KVBoost
from kvboost.errors import KVBoostError

LONG_ANSWER = 300


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
        answered = ours.poll(MOST_SECONDS)
        process.kill()
        process.join()
        expect(answered, f"the child did not answer within {MOST_SECONDS} s")
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
    deadline = time.monotonic() + MOST_SECONDS
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
