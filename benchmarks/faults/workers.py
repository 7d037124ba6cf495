"""A small engine that is quick to start, and processes that share one cache folder."""

from __future__ import annotations

import multiprocessing
import random
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401  (once, before writers are forked)

from benchmarks.shapes import number_tokenizer, random_model
from kvboost import GenerationMode, KVBoost
from kvboost.config import EngineConfig
from kvboost.model.loading.load import LoadedModel, wrap

TOKENS = 256
PROMPTS = 12
ANSWER_TOKENS = 4
START_SECONDS = 120


def small_model() -> LoadedModel:
    """The same weights every time; it reads a prompt in milliseconds."""
    sizes = {"num_hidden_layers": 3, "vocab_size": TOKENS, "max_position_embeddings": 512}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = random_model("tiny", "cpu", torch.float32, **sizes)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)  # louder weights, so that no two tokens are nearly as likely
    return wrap(model, number_tokenizer(TOKENS), name="small random model")


def small_engine(**config: Any) -> KVBoost:
    return KVBoost(small_model(), EngineConfig(chunk_size=16, **config))


def prompt(number: int) -> list[int]:
    """One of the prompts that all workers share. Three in a row have the same beginning."""
    start, rest = random.Random(number // 3), random.Random(f"rest {number}")
    return [start.randrange(TOKENS) for _ in range(96)] + [
        rest.randrange(TOKENS) for _ in range(48)
    ]


def plain_answers() -> list[list[int]]:
    """The model's answers to the shared prompts without any cache."""
    with small_engine() as engine:
        return [
            engine.generate(prompt(n), ANSWER_TOKENS, GenerationMode.BASELINE).token_ids
            for n in range(PROMPTS)
        ]


class Writer:
    """A process that answers the shared prompts over a cache folder, until it is ended. It has
    given its first answer when it is made; raises ``EOFError`` if it could not."""

    def __init__(self, seed: int, expected: list[list[int]], **config: Any) -> None:
        # A process that has everything imported forks it: that takes milliseconds, not seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_write, args=(theirs, seed, expected), kwargs=config, daemon=True
        )
        self._process.start()
        theirs.close()
        with ours:
            if not ours.poll(START_SECONDS):
                raise EOFError(f"a writer gave no answer within {START_SECONDS} s")
            self.pid: int = ours.recv()

    def end(self, how: signal.Signals) -> int | None:
        """Sends a signal and returns the exit code: minus the signal if that ended it."""
        (self._process.kill if how is signal.SIGKILL else self._process.terminate)()
        self._process.join(START_SECONDS)
        return self._process.exitcode


def _write(pipe: Connection, seed: int, expected: list[list[int]], **config: Any) -> None:
    """Answers in random order until SIGTERM arrives. Every other answer has a salt of its own, so
    that chunks are written and evicted all the time. Raises if an answer is not the expected one or
    if the folder outgrows its budget."""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this
    torch.set_num_threads(1)
    rng = random.Random(seed)
    with small_engine(**config) as engine:
        answered = 0
        while not stopped:
            number = rng.randrange(len(expected))
            salt = f"{seed} {answered}" if answered % 2 else ""
            given = engine.generate(
                prompt(number), ANSWER_TOKENS, GenerationMode.PREFIX_CACHE, cache_salt=salt
            )
            if given.token_ids != expected[number]:
                raise AssertionError(f"prompt {number}: {given.token_ids}, not {expected[number]}")
            engine.flush()
            disk = engine.cache_stats()["tiers"]["disk"]
            if disk["bytes"] > disk["max_bytes"]:
                raise AssertionError(f"over budget: {disk}")
            if not answered:
                pipe.send(multiprocessing.current_process().pid)
            answered += 1
