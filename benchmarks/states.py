"""Measures what a model with states saves when it goes on from stored states.

    python -m benchmarks states [--tokens 4096] [--repeat 3]

A random model with the layers of Qwen3-Next (three of four are linear) and about 100 million
weights runs on a CPU in float32. It reads a prefix and a question; then the prefix alone; then it
goes on from the prefix with other questions. The last line is JSON: medians of the seconds to the
first token, and resumed divided by read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from benchmarks.shapes import number_tokenizer
from kvboost import GenerationMode, KVBoost

VOCABULARY = 4096
QUESTION = 32
"""Tokens after the prefix."""


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Resuming from states against reading again.")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    model = make_model()
    ids = torch.randint(1, VOCABULARY, (options.tokens + QUESTION * options.repeat,)).tolist()
    prefix = ids[: options.tokens]
    engine = KVBoost.from_model(model, number_tokenizer(VOCABULARY))
    forward = engine._model.forward

    def seconds(mode: GenerationMode, number: int) -> tuple[float, int]:
        question = ids[options.tokens + number * QUESTION :][:QUESTION]
        began = time.perf_counter()
        result = engine.generate([*prefix, *question], 1, mode, keep=False)
        return time.perf_counter() - began, result.cached_tokens

    with engine:
        engine.generate(prefix[:256], 1, GenerationMode.BASELINE)  # the first forward is slower
        read = [seconds(GenerationMode.BASELINE, n)[0] for n in range(options.repeat)]
        engine.warm(prefix)
        resumed = [seconds(GenerationMode.PREFIX_CACHE, n) for n in range(options.repeat)]
        assert {cached for _, cached in resumed} == {options.tokens}, resumed
    medians = statistics.median(read), statistics.median(one for one, _ in resumed)
    found = {
        "prefix_tokens": options.tokens,
        "weights": sum(weight.numel() for weight in model.parameters()),
        "state_bytes": forward.states.nbytes,
        "kv_bytes_per_token": forward.shape.row_bytes,
        "state_every": engine._runtime.backend.state_every,
        "threads": torch.get_num_threads(),
        "read_s": round(medians[0], 3),
        "resumed_s": round(medians[1], 3),
        "resumed_over_read": round(medians[1] / medians[0], 4),
    }
    print(json.dumps(found))
