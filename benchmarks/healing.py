"""What verified answers and healing cost on this machine, end to end.

Each round asks about passages in a new order, which are all known from another order: in mode
``prefix_cache`` (a full prefill), over repaired rows as ever, and verified. All three give an
answer of the same length, and their caches are apart. Then the repaired conversations are healed.
Medians of the whole time of a call, of the processor's time for it and of the time until the first
text, in milliseconds; the ratio of verified to full prefill, round by round; how many rows a second
healing computes. The last line is JSON.

    python -m benchmarks healing [--model smollm2-135m] [--dtype float32] [--rounds 5]

With ``--shape``, a model with random weights on a GPU answers after moved text, with healing in its
steps and without it: milliseconds of a step, and how many steps healing takes.

    python -m benchmarks healing --shape 7b [--tokens 8192]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from itertools import chain, pairwise
from typing import Any

import torch

from benchmarks.shapes import SHAPES, number_tokenizer, random_model
from benchmarks.vllm_connector import HEADER, PASSAGES, QUESTION, random_tokens
from kvboost import KVBoost
from kvboost.bench.texts.prompts import PATTERNS, fragments, question

ANSWERS = (64, 256)
PASSAGE_TOKENS = 250
WAYS: dict[str, dict[str, Any]] = {
    "full prefill": {"mode": "prefix_cache"},
    "repaired": {},
    "verified": {"exactness": "verified"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--shape", choices=SHAPES, help="random weights: healing in decode steps")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt, with --shape")
    parser.add_argument("--steps", type=int, default=160, help="of an answer, with --shape")
    options = parser.parse_args()
    if options.shape:
        print(json.dumps(heal_in_steps(options)))
        return
    with KVBoost.from_pretrained(
        options.model, dtype=options.dtype, reuse_moved="always", heal="auto"
    ) as engine:
        report: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "model": engine.model_name,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "rounds": options.rounds,
            "answers": [
                measure(engine, tokens, options.rounds, options.passages) for tokens in ANSWERS
            ],
            "healing": {
                name: engine.cache_stats()["healing"][name]
                for name in ("healed", "computed_tokens", "seconds", "tokens_per_second")
            },
        }
    print(f"healing computed {report['healing']['tokens_per_second']:,.0f} rows a second")
    print(json.dumps(report))


def measure(engine: KVBoost, answer_tokens: int, rounds: int, passages: int) -> dict[str, Any]:
    """One length of answers: what each way takes, and how far drafts were right."""
    encode = fragments(engine.encode)
    shared = PATTERNS["rag"].shared(encode, passages * PASSAGE_TOKENS)
    texts = [shared[at : at + PASSAGE_TOKENS] for at in range(0, len(shared), PASSAGE_TOKENS)]
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    same = 0
    prompt_tokens = moved_tokens = 0
    for number in range(rounds + 1):  # the first one warms up
        order = random.Random(number).sample(texts[1:], len(texts) - 1)
        order.insert(1, texts[0])  # not the first: no beginning of the prompt is an exact hit
        prompt = [token for text in order for token in text] + question(encode, number, 32)
        answers = {}
        for way, how in WAYS.items():
            salt = f"{answer_tokens} {number} {way}"
            if way != "full prefill":
                engine.warm(shared, cache_salt=salt)
            began = time.process_time()
            result = engine.generate(prompt, answer_tokens, cache_salt=salt, ignore_eos=True, **how)
            processor_ms = (time.process_time() - began) * 1e3
            answers[way] = result
            if number:
                times[way].append((result.total_ms, processor_ms, result.ttft_ms))
        engine.heal()
        if number:
            repaired = answers["repaired"]
            same += answers["verified"].token_ids == answers["full prefill"].token_ids
            prompt_tokens, moved_tokens = repaired.prompt_tokens, repaired.moved_tokens
        for way in WAYS:
            engine.forget_salt(f"{answer_tokens} {number} {way}")
    found: dict[str, Any] = {
        "answer_tokens": answer_tokens,
        "prompt_tokens": prompt_tokens,
        "moved_tokens": moved_tokens,
        "same_as_full_prefill": f"{same} of {rounds}",
    }
    print(
        f"{answer_tokens} tokens after {prompt_tokens:,}, {moved_tokens:,} of them known from "
        f"another place: verified answers equal {found['same_as_full_prefill']}"
    )
    for way, measured in times.items():
        columns = zip(*measured, strict=True)
        total, processor, first = (round(statistics.median(column), 1) for column in columns)
        found[way] = {"total_ms": total, "processor_ms": processor, "first_text_ms": first}
        print(
            f"  {way:13} {total:9.0f} ms in all, {processor:9.0f} ms of the processor, "
            f"first text after {first:7.0f} ms",
            flush=True,
        )
    pairs = list(zip(times["verified"], times["full prefill"], strict=True))
    for column, name in enumerate(("total", "processor")):
        ratio = statistics.median(mine[column] / plain[column] for mine, plain in pairs)
        found[f"verified_to_full_prefill_{name}"] = round(ratio, 3)
    print(
        f"  verified ÷ full prefill: {found['verified_to_full_prefill_total']:.2f} in all, "
        f"{found['verified_to_full_prefill_processor']:.2f} of the processor's time",
        flush=True,
    )
    return found


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
