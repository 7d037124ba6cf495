"""The cost of healing for the steps of an answer.

A model with random weights on a GPU answers after moved text, with healing in its steps and not.

    python -m benchmarks healing --shape 7b [--tokens 8192]

Prints milliseconds of a step, and how many steps healing takes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import chain, pairwise
from typing import Any

import torch

from benchmarks.shapes import SHAPES, number_tokenizer, random_model
from benchmarks.vllm_connector import HEADER, PASSAGES, QUESTION, random_tokens
from kvboost import KVBoost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--steps", type=int, default=160, help="of an answer")
    print(json.dumps(heal_in_steps(parser.parse_args())))


def heal_in_steps(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rng = random.Random(1)
    passages = [
        random_tokens(rng, (options.tokens - HEADER - QUESTION) // PASSAGES)
        for _ in range(PASSAGES)
    ]
    found: dict[str, Any] = {"shape": options.shape, "tokens": options.tokens}
    with KVBoost.from_model(
        random_model(options.shape, device, dtype),
        number_tokenizer(),
        reuse_moved="always",
        recompute_strategy="query",  # random weights tell "auto" nothing about how many rows
        recompute_ratio=0.15,
    ) as engine:
        engine.warm([*random_tokens(rng, HEADER), *chain.from_iterable(passages)])
        for number in range(options.rounds + 1):  # the first one warms up
            for heal in ("off", "auto"):
                order = chain.from_iterable(rng.sample(passages, PASSAGES))
                prompt = [*random_tokens(rng, HEADER), *order, *random_tokens(rng, QUESTION)]
                marks = []
                stream = engine.stream(
                    prompt, options.steps, ignore_eos=True, keep=False, heal=heal
                )
                for _ in stream:
                    marks.append(time.perf_counter())
                result = stream.result
                steps = [(after - before) * 1e3 for before, after in pairwise(marks)]
                if number:
                    one = {
                        "median_ms": statistics.median(steps),
                        "mean_ms": statistics.mean(steps),
                        "longest_ms": max(steps),
                        "moved_tokens": result.moved_tokens,
                        "exact_from": result.answer_exact_from,
                    }
                    if heal == "auto" and (healed := result.answer_exact_from):
                        one |= {
                            "healing_median_ms": statistics.median(steps[:healed]),
                            "healing_mean_ms": statistics.mean(steps[:healed]),
                        }
                    found.setdefault(heal, []).append(one)
                    told = ", ".join(
                        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in one.items()
                    )
                    print(f"  heal={heal}: {told}", flush=True)
    return found
