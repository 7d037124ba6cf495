"""Processes that use one cache folder at the same time and can be killed.

One process imports everything and forks a worker for every line it reads: a fresh start takes
seconds, a fork takes milliseconds. The lines are JSON objects, the arguments of :func:`work`. What
it prints:

    pid            a worker has opened the folder and given its first answer
    pid status     a worker has ended; or it failed before its first answer
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost import GenerationMode, KVBoost
from kvboost.config import EngineConfig

PROMPTS = 12
ANSWER_TOKENS = 4
END = 256
"""The token that ends an answer; those below it are bytes."""


def small_engine(**config: Any) -> KVBoost:
    """An engine on a random Llama in float32, the same one every time. It reads a prompt in
    milliseconds, so that a folder sees thousands of writes."""
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=END + 4,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = LlamaForCausalLM(llama).float().eval()
    with torch.no_grad():  # louder weights, so that no two tokens are nearly as likely
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return KVBoost.from_model(
        model, _byte_tokenizer(), config=EngineConfig(chunk_size=16, **config)
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def prompt(number: int) -> list[int]:
    """One of the prompts that all workers share. Three in a row have the same beginning."""
    start, rest = random.Random(number // 3), random.Random(f"rest {number}")
    return [start.randrange(END) for _ in range(96)] + [rest.randrange(END) for _ in range(48)]


def plain_answers(count: int = PROMPTS) -> list[list[int]]:
    """What the model answers to the shared prompts without any cache."""
    with small_engine() as engine:
        return [
            engine.generate(prompt(n), ANSWER_TOKENS, GenerationMode.BASELINE).token_ids
            for n in range(count)
        ]


def work(on_first: Callable[[], None], seed: int, expected: list[list[int]], **config: Any) -> None:
    """Answers the shared prompts in random order until SIGTERM arrives, and says when the first
    answer was given. Every other answer has a salt of its own, so that chunks are written and
    evicted all the time. Raises if an answer is not the expected one or if the folder outgrows its
    budget."""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
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
                on_first()
            answered += 1


class Workers:
    """The parent's side. Use it as a context manager: the workers end with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvboost.bench.load.fault_workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pids: set[int] = set()

    def begin(self, **job: Any) -> int:
        """Starts a worker and returns its pid once it has given its first answer."""
        self._tell(job)
        pid, *failed = self._hear()
        if failed:
            raise RuntimeError("a worker failed before its first answer")
        self._pids.add(pid)
        return pid

    def end(self, pid: int, how: signal.Signals) -> int:
        """Sends a signal and returns the status with which the worker ended."""
        os.kill(pid, how)
        self._tell({"wait": pid})
        ended, status = self._hear()
        assert ended == pid
        self._pids.remove(pid)
        return status

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in sorted(self._pids):
            os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _tell(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> list[int]:
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if not words:
            raise RuntimeError("the process that starts the workers has ended")
        return [int(word) for word in words]


def _run_worker(job: dict[str, Any]) -> int:
    begun = False

    def on_first() -> None:
        nonlocal begun
        begun = True
        print(os.getpid(), flush=True)

    try:
        work(on_first, **job)
    except BaseException:
        traceback.print_exc()
        if not begun:
            print(os.getpid(), 1, flush=True)
        return 1
    return 0


def main() -> None:
    torch.set_num_threads(1)
    small_engine().close()  # whatever is imported late is imported now
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            print(*os.waitpid(job["wait"], 0), flush=True)
        elif os.fork() == 0:
            os._exit(_run_worker(job))


if __name__ == "__main__":
    main()
