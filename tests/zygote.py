"""A process that has everything imported and forks workers: a fresh start takes seconds, a fork
milliseconds. Each line on standard input, ``{"seed", "seconds", "folder", ...}``, makes one worker
that reads prompts into a cache folder until its time is over or it is killed.

    pid            a worker has begun
    pid status     it has ended
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback

import torch

from kvboost import GenerationMode
from kvboost.cache.tiers import writer
from tiny import make_engine, tiny_model


def prompt(number: int) -> list[int]:
    """One of the prompts that all workers share; some begin alike."""
    rng = random.Random(number // 3)
    ids = [rng.randrange(256) for _ in range(96)]
    tail = random.Random(number)
    return [*ids, *(tail.randrange(256) for _ in range(48))]


def work(seed: int, seconds: float, folder: str, prompts: int, **config: int) -> None:
    """Answers prompts with and without the cache; raises if the answers differ."""
    writer.COLD_SECONDS = 0.0
    rng = random.Random(seed)
    engine = make_engine(tiny_model("llama"), disk_cache_dir=folder, **config)
    print(os.getpid(), flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ids = prompt(rng.randrange(prompts))
        cached = engine.generate(ids, 4, GenerationMode.PREFIX_CACHE)
        expected = engine.generate(ids, 4, GenerationMode.BASELINE)
        if cached.token_ids != expected.token_ids:
            raise AssertionError(f"answers differ: {cached} {expected}")
        disk = engine.cache_stats()["tiers"]["disk"]
        if disk["bytes"] > disk["max_bytes"]:
            raise AssertionError(f"over budget: {disk}")
    engine.close()


def main() -> None:
    torch.set_num_threads(1)
    workers: dict[int, None] = {}
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("wait"):
            while workers:
                pid, status = os.wait()
                del workers[pid]
                print(pid, status, flush=True)
            continue
        pid = os.fork()
        if pid:
            workers[pid] = None
            continue
        status = 0
        try:
            work(**job)
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)


if __name__ == "__main__":
    main()
