"""Whether an engine whose requests have far rows answers as one with enough memory does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.shapes import number_tokenizer
from kvboost import EngineConfig, KVBoost
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.store import FarStore

LEAST_ROWS = 384
"""Rows of the smaller engine: a third of the prompt, and not fewer than this."""
ANSWER = 8


def same_answers(model: Any, shape: KVShape, vocabulary: int, num_tokens: int) -> dict[str, int]:
    """The number of tokens that two answers have in common at their beginning, the second one over
    rows of the cache; how many tokens were cached for it; and how many requests had far rows."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(vocabulary, (num_tokens,), generator=generator).tolist()
    near = max(LEAST_ROWS, num_tokens // 3) * shape.row_bytes
    enough = 2 * num_tokens * shape.row_bytes
    small = {"max_kv_bytes": near, "far_kv_bytes": enough}
    expected, _, _ = _answers(model, vocabulary, prompt, {"max_kv_bytes": enough})
    found, cached, num_far = _answers(model, vocabulary, prompt, small)
    alike = [_common(one, other) for one, other in zip(expected, found, strict=True)]
    return {"alike": min(alike), "of": ANSWER, "cached": cached, "requests": num_far}


def _answers(
    model: Any, vocabulary: int, prompt: list[int], options: dict[str, Any]
) -> tuple[list[list[int]], int, int]:
    config = EngineConfig(graphs="off", heal="off", speculate="off", gpu_cache_bytes=0, **options)
    with KVBoost.from_model(model, number_tokenizer(vocabulary), config=config) as engine:
        given = [engine.generate(prompt, ANSWER, "prefix_cache", ignore_eos=True) for _ in range(2)]
        far = engine._runtime.pool.far
        answers = [one.token_ids for one in given]
        return answers, given[1].exact_tokens, far.num_lent if isinstance(far, FarStore) else 0


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(first))
