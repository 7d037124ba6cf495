"""What a model with states saves when it goes on from stored states, and when requests share steps.

A random model with the layers of Qwen3-Next (three of four are linear) and about 100 million
weights runs on a CPU in float32. It reads a prefix and a question; then the prefix alone; then it
goes on from the prefix with other questions. Figures are medians of the seconds to the first token,
and resumed divided by read. Then several requests answer, after a part of the prefix: medians of
the milliseconds of a step in which each gets a token, in one forward, one request after another,
and of one request alone, in turn.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from benchmarks.shapes import number_tokenizer
from kvboost import GenerationMode, KVBoost
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.segment import Segment

VOCABULARY = 4096
QUESTION = 32
"""Tokens after the prefix."""
ANSWERED = 256
"""Tokens before the steps of an answer."""


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"tokens": 512, "repeat": 1, "steps": 2}

    tokens: int = option(4096, "Tokens of the prefix.", least=256)
    repeat: int = option(3, "How often each is done.", least=1)
    requests: int = option(8, "Requests that answer at once.", least=2)
    steps: int = option(15, "Steps of their answers.", least=1)


def make_model() -> Qwen3NextForCausalLM:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=16384,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3NextForCausalLM(config).eval()


def step_ms(forward: Forward, ids: list[int], settings: Settings) -> dict[str, float]:
    """The milliseconds of a step: of all requests together, one by one, and of one request."""
    kvs = [
        make_kv(forward.shape, ANSWERED + 3 * settings.steps + 3) for _ in range(settings.requests)
    ]
    token = torch.tensor(ids[:1])
    for kv in kvs:
        forward([Segment(kv, torch.tensor(ids[:ANSWERED]), range(ANSWERED))])
    ends = [ANSWERED] * len(kvs)

    def step(count: int) -> float:
        segments = []
        for number in range(count):
            place = range(ends[number], ends[number] + 1)
            segments.append(Segment(kvs[number], token, place, decodes=True))
            ends[number] += 1
        began = time.perf_counter()
        forward.run(segments)
        return (time.perf_counter() - began) * 1000

    assert forward.shares_steps
    ways = {"together": (True, len(kvs)), "one_by_one": (False, len(kvs)), "alone": (True, 1)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(settings.steps + 1):
        for name, (shares, count) in ways.items():
            forward.shares_steps = shares
            milliseconds = step(count)
            if number:  # the first is slower
                taken[name].append(milliseconds)
    forward.shares_steps = True
    return {name: statistics.median(of) for name, of in taken.items()}


def run(settings: Settings, bench: Bench) -> Report:
    bench.describe("cpu", torch.float32)
    model = make_model()
    length = settings.tokens + QUESTION * settings.repeat
    ids = torch.randint(1, VOCABULARY, (length,)).tolist()
    prefix = ids[: settings.tokens]
    engine = KVBoost.from_model(model, number_tokenizer(VOCABULARY))
    forward = engine.model.forward

    def seconds(mode: GenerationMode, number: int) -> tuple[float, int]:
        question = ids[settings.tokens + number * QUESTION :][:QUESTION]
        began = time.perf_counter()
        result = engine.generate([*prefix, *question], 1, mode, keep=False)
        return time.perf_counter() - began, result.cached_tokens

    with engine:
        engine.generate(prefix[:256], 1, GenerationMode.BASELINE)  # the first forward is slower
        read = [seconds(GenerationMode.BASELINE, n)[0] for n in range(settings.repeat)]
        engine.warm(prefix)
        resumed = [seconds(GenerationMode.PREFIX_CACHE, n) for n in range(settings.repeat)]
        assert {cached for _, cached in resumed} == {settings.tokens}, resumed
        steps = step_ms(forward, ids, settings)
    read_s, resumed_s = statistics.median(read), statistics.median(one for one, _ in resumed)
    told = (
        f"first token over {settings.tokens:,} tokens and a question: read {read_s:.3f} s, "
        f"resumed {resumed_s:.3f} s, {resumed_s / read_s:.3f} of it"
    )
    together, one_by_one, alone = steps["together"], steps["one_by_one"], steps["alone"]
    stepped = (
        f"a step of {settings.requests} answers: {together:.1f} ms in one forward, "
        f"{one_by_one:.1f} ms one by one, {together / one_by_one:.3f} of it; of one answer: "
        f"{alone:.1f} ms"
    )
    return Report(
        {
            "weights": sum(weight.numel() for weight in model.parameters()),
            "state_bytes": forward.states.nbytes,
            "kv_bytes_per_token": forward.shape.row_bytes,
            "state_every": engine.runtime.backend.state_every,
            "read_s": read_s,
            "resumed_s": resumed_s,
            "resumed_over_read": resumed_s / read_s,
            "step_ms": steps,
            "together_over_one_by_one": together / one_by_one,
        },
        [told, stepped],
    )
