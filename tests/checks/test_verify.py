from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvboost.cache.quantize import plain
from kvboost.cache.tiers.ram import RamTier
from kvboost.checks import verify
from support.tiny import make_engine, tiny_model


def damage(chunk):
    kv = chunk.data.tensors["kv"].clone()
    noise = torch.randn(kv[:, 1].shape, generator=torch.Generator().manual_seed(0))
    kv[:, 1] += 0.5 * noise.to(kv.device)
    return replace(chunk, data=plain(kv))


def test_verification_sees_hits_and_agreement_and_leaves_no_trace(engine) -> None:
    report = engine.verify_correctness(max_new_tokens=8)
    assert report
    assert report.reused_share > 0.5
    assert report.tokens_equal
    assert report.max_logit_delta <= report.tolerance_logit == 1e-3
    assert engine.cache_stats()["hot_chunks"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_damaged_tensor_fails_verification(monkeypatch, dtype) -> None:
    monkeypatch.setattr(verify, "QUESTIONS", verify.QUESTIONS[:1])  # many CPUs are slow in bfloat16
    engine = make_engine(tiny_model("llama").to(dtype))
    assert engine.verify_correctness(max_new_tokens=8)
    put = RamTier.put
    monkeypatch.setattr(RamTier, "put", lambda self, chunk: put(self, damage(chunk)))
    report = engine.verify_correctness(max_new_tokens=8)
    assert not report
    assert any("mean KL" in problem or "logits differ" in problem for problem in report.problems)


def test_a_cache_that_never_hits_is_not_correct() -> None:
    report = make_engine(tiny_model("llama"), max_cache_bytes=0).verify_correctness(4)
    assert not report
    assert "only 0%" in report.problems[0]


def test_not_a_number_is_not_agreement(monkeypatch, engine) -> None:
    put = RamTier.put

    def poison(self, chunk):
        kv = torch.full_like(chunk.data.tensors["kv"], float("nan"))
        return put(self, replace(chunk, data=plain(kv)))

    monkeypatch.setattr(RamTier, "put", poison)
    assert not engine.verify_correctness(max_new_tokens=4)
