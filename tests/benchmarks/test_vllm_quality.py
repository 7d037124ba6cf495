from __future__ import annotations

import pytest
import torch

from benchmarks import vllm_quality as quality


def make_case(question: int, kl: float, in_vllm: float, donor: str = "header") -> object:
    found = {"kl": in_vllm, "between": 1e-6, "moved": 480, "recomputed": 72}
    return quality.Case(question, donor, [[1]], [1, 2], torch.zeros(4), kl, 490, 73, found)


def test_the_ratio_is_that_of_means_over_questions() -> None:
    cases = [make_case(0, 0.1, 0.1), make_case(0, 0.3, 0.5), make_case(1, 0.4, 0.2)]
    cases.append(make_case(0, 9.0, 9.0, "reordered"))
    found = quality.summary(cases, "header")
    assert found["prompts"] == 3
    assert found["kl_transformers"] == pytest.approx(0.3)
    assert found["kl_vllm"] == pytest.approx(0.25)
    assert found["ratio"] == pytest.approx(0.25 / 0.3)
    low, high = found["interval"]  # one question alone, or the other
    assert low == pytest.approx(0.5) and high == pytest.approx(1.5)
    assert found["moved_tokens"] == [490, 480] and found["recomputed_tokens"] == [73, 72]
