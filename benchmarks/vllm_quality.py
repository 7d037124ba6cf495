"""Is moved text as good through the connector in vLLM as it is on transformers?

    python -m benchmarks vllm_quality --model FOLDER [--dataset FILE]... [--limit 20] [--tokens 4]

Runs in an environment that has vLLM and KVBoost. Passages are read in donor prompts, then asked
about in a prompt that holds them at other places. The same token ids go through KVBoost on
transformers and through vLLM with the connector, with the same chunks, strategy and ratio, and each
is compared with its own full prefill: KL divergence over the whole vocabulary, of the first token
of the answer, and of the next ones after the beginning of the full answer. The interval resamples
questions. "Between engines" is the KL between the two full prefills: what different kernels cost.
JSON comes last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console

from kvboost import GenerationMode, KVBoost, SpanKind
from kvboost.bench.kit.tables import table
from kvboost.bench.texts.questions import Question, choose_questions
from kvboost.results import kl_divergence

DONORS = {"header": "each passage read alone", "reordered": "all read in another order"}
ROUNDS = 2000


@dataclass
class Case:
    """A prompt, what was read before it, and what transformers made of it."""

    question: int
    donor: str
    read: list[list[int]]
    prompt: list[int]
    full: torch.Tensor
    """Logits of the next token."""
    kl: float
    moved: int
    recomputed: int
    vllm: dict[str, float] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--dataset", action="append", default=[], help="JSON lines of questions")
    parser.add_argument("--limit", type=int, default=20, help="questions of every file")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--passage-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4, help="tokens of the answer to compare")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--dtype", help="bfloat16 on a GPU and float32 elsewhere, if not given")
    parser.add_argument("--memory", type=float, default=0.5, help="vLLM's share of the GPU")
    parser.add_argument("--compile", action="store_true", help="vLLM compiles the model")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    questions = choose_questions(options.dataset, options.limit, "1/1")
    console = Console(stderr=True)
    console.print(f"{len(questions)} questions on transformers, in {options.dtype}")
    with KVBoost.from_pretrained(
        options.model,
        dtype=options.dtype,
        reuse_moved="always",
        recompute_strategy=options.strategy,
    ) as engine:
        cases = list(on_transformers(engine, questions, options))
    del engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    console.print(f"the same {len(cases)} prompts in vLLM")
    in_vllm(cases, options, on_gpu)
    report = {"dtype": options.dtype, "ratio": options.ratio, "strategy": options.strategy}
    report |= {
        "questions": len(questions),
        "donors": {name: summary(cases, name) for name in DONORS},
    }
    show(report)
    print(json.dumps(report))


def on_transformers(
    engine: KVBoost, questions: Sequence[Question], options: argparse.Namespace
) -> Iterator[Case]:
    baseline = GenerationMode.BASELINE
    for number, question in enumerate(questions):
        documents = cut(engine, question, options)
        ask = f"Question: {question.question}\nAnswer in a few words."
        asked = arrange(engine, documents, ask)
        answer = engine.generate(asked, options.tokens, baseline).token_ids
        for donor in DONORS:
            salt, read = f"{number} {donor}", donor_prompts(engine, documents, donor, number)
            for ids in read:
                engine.generate(ids, 1, GenerationMode.PREFIX_CACHE, cache_salt=salt)
            for length, token in enumerate(answer):
                prompt = [*asked, *answer[:length]]
                full = engine.score(prompt, [token], baseline).logits
                scored = engine.score(
                    prompt, [token], cache_salt=salt, recompute_ratio=options.ratio
                )
                yield Case(
                    number,
                    donor,
                    read,
                    prompt,
                    full[0].float().cpu(),
                    float(kl_divergence(full, scored.logits)[0]),
                    scored.reuse.count(SpanKind.MOVED),
                    len(scored.reuse.recomputed),
                )
            engine.forget_salt(salt)


def in_vllm(cases: Sequence[Case], options: argparse.Namespace, on_gpu: bool) -> None:
    """Fills in what vLLM makes of every case. A salt of its own keeps each from the others: what
    one has repaired must not serve the next."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=max(len(case.prompt) for case in cases) + 16,
        block_size=16 if on_gpu else 32,
        enforce_eager=not options.compile,
        gpu_memory_utilization=options.memory,
        max_logprobs=-1,
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_connector_module_path="kvboost.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "reuse_moved": "always",
                "recompute_strategy": options.strategy,
                "recompute_ratio": options.ratio,
            },
        ),
    )

    def ask(ids: Sequence[int], mode: str, salt: str, logprobs: int | None = None) -> Any:
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=logprobs,
            detokenize=False,
            extra_args={"kvboost": mode},
        )
        prompt = {"prompt_token_ids": list(ids), "cache_salt": salt}
        return llm.generate([prompt], params, use_tqdm=False)[0]

    def logits(answer: Any, size: int) -> torch.Tensor:
        likely = torch.full((size,), float("-inf"))
        for token, one in answer.outputs[0].logprobs[0].items():
            if token < size:  # vLLM may pad the vocabulary
                likely[token] = one.logprob
        return likely

    for number, case in enumerate(cases):
        size, salt = len(case.full), f"case {number}"
        full = ask(case.prompt, "off", f"{salt} in full", -1)
        for ids in case.read:
            ask(ids, "exact", salt)
        moved = ask(case.prompt, "repaired", salt, -1)
        used = (moved.kv_transfer_params or {}).get("kvboost", {})
        if full.num_cached_tokens or not used.get("moved_tokens"):
            raise SystemExit(f"nothing was moved in vLLM: {used}; the log says why")
        plain, repaired = logits(full, size), logits(moved, size)
        case.vllm = {
            "kl": float(kl_divergence(plain[None], repaired[None])[0]),
            "between": float(kl_divergence(case.full[None], plain[None])[0]),
            "moved": used["moved_tokens"],
            "recomputed": used["recomputed_tokens"],
        }


def cut(engine: KVBoost, question: Question, options: argparse.Namespace) -> list[str]:
    texts = [text.strip() + "\n\n" for text in question.passages[: options.passages]]
    ids = [engine.encode(text) for text in texts]
    return [
        text if len(one) <= options.passage_tokens else engine.decode(one[: options.passage_tokens])
        for text, one in zip(texts, ids, strict=True)
    ]


def arrange(engine: KVBoost, documents: Sequence[str], ask: str) -> list[int]:
    return engine.arrange(None, list(documents), ask, cache_salt="none").prompt


def donor_prompts(
    engine: KVBoost, documents: Sequence[str], donor: str, seed: int
) -> list[list[int]]:
    if donor == "header":
        return [arrange(engine, [text], "") for text in documents]
    order, rng = list(documents), random.Random(seed)
    while order == list(documents):
        rng.shuffle(order)
    return [arrange(engine, order, "Summarize this.")]


def summary(cases: Sequence[Case], donor: str) -> dict[str, Any]:
    """Means over questions; every token of a question counts the same."""
    some = [case for case in cases if case.donor == donor]
    numbers = sorted({case.question for case in some})
    pairs = np.array(
        [
            np.mean([(case.kl, case.vllm["kl"]) for case in some if case.question == one], axis=0)
            for one in numbers
        ]
    )
    picks = np.random.default_rng(0).integers(len(pairs), size=(ROUNDS, len(pairs)))
    there, here = pairs[picks].mean(1).T
    low, high = np.quantile(here / there, [0.025, 0.975])
    mean_there, mean_here = pairs.mean(0)
    return {
        "prompts": len(some),
        "kl_transformers": float(mean_there),
        "kl_vllm": float(mean_here),
        "ratio": float(mean_here / mean_there),
        "interval": [float(low), float(high)],
        "kl_between_engines": float(np.mean([case.vllm["between"] for case in some])),
        "moved_tokens": [
            statistics.mean(case.moved for case in some),
            statistics.mean(case.vllm["moved"] for case in some),
        ],
        "recomputed_tokens": [
            statistics.mean(case.recomputed for case in some),
            statistics.mean(case.vllm["recomputed"] for case in some),
        ],
    }


def show(report: dict[str, Any]) -> None:
    rows = []
    for donor, found in report["donors"].items():
        low, high = found["interval"]
        rows.append(
            (
                DONORS[donor],
                f"{found['kl_transformers']:.5f}",
                f"{found['kl_vllm']:.5f}",
                f"{found['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{found['kl_between_engines']:.2g}",
                " / ".join(f"{number:.0f}" for number in found["moved_tokens"]),
                " / ".join(f"{number:.0f}" for number in found["recomputed_tokens"]),
            )
        )
    names = ("transformers", "vLLM", "ratio", "95 %", "between engines", "moved", "recomputed")
    title = "KL from full prefill, moved text on transformers and in vLLM"
    Console(width=140).print(table(title, ("",), names, rows))
