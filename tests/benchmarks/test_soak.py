from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.soak import CHUNKS, levels, soak, used_mb
from kvboost.model.loading.load import wrap
from support.tiny import byte_tokenizer, tiny_model


def test_a_short_soak_finds_no_problem(tmp_path: Path) -> None:
    """The command's short form: all kinds of requests over 64 chunks, memory and disk."""
    model = wrap(tiny_model("llama", max_position_embeddings=2048), byte_tokenizer())
    seen = soak(model, 2.0, tmp_path, least_requests=80)
    # So short a run is still filling its pools when it begins to be watched.
    assert [problem for problem in seen.problems if not problem.startswith("memory")] == []
    assert seen.growth < 0.3
    assert seen.requests >= 80 and seen.checked > 0 and seen.reused_share > 0.1
    assert {"pin", "load_adapter", "forget_salt"} <= seen.done.keys()
    assert seen.evicted > CHUNKS and seen.promoted > 0 and seen.demoted > 0


def test_memory_is_judged_by_medians_over_time() -> None:
    samples = [100.0] * 50 + [500.0] + [110.0] * 49
    assert levels(samples) == [100.0] * 10 + [110.0] * 10
    assert levels([7.0]) == [7.0]
    assert used_mb(torch.device("cpu")) > 10
