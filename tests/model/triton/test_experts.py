"""Mixtures of experts by our kernels, against transformers' own loops over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations import moe

from kvboost.model.execution.experts import mixed
from kvboost.model.triton import experts
from kvboost.model.triton.experts import in_blocks
from support.families import family_model
from support.tiny import DEVICE, tiny_model


@pytest.mark.parametrize("pairs", [1, 6, 40, 200])
@pytest.mark.parametrize("rows", [16, 32])
def test_every_pair_is_in_one_block_of_its_expert(
    pairs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = torch.randint(0, 5, (pairs,), device=DEVICE)
    blocks = in_blocks(chosen, 5, rows)
    monkeypatch.setattr(experts, "FEW_PAIRS", 0)
    reference = in_blocks(chosen, 5, rows)
    for each in (blocks, reference):
        assert len(each.pairs) == rows * len(each.experts)
        of_block = each.experts.repeat_interleave(rows)
        used = each.pairs >= 0
        assert sorted(each.pairs[used].tolist()) == list(range(pairs))
        assert torch.equal(chosen[each.pairs[used].long()].int(), of_block[used])
    assert torch.equal(blocks.pairs, reference.pairs)
    assert torch.equal(blocks.experts, reference.experts)


def experts_of(name: str, dtype: torch.dtype) -> Any:
    """The experts of a tiny model's first layer that has such."""
    model = family_model(name) if name == "qwen3_moe" else tiny_model(name)
    model = model.to(DEVICE, dtype)
    module = next(part for part in model.modules() if hasattr(part, "is_transposed"))
    for weight in module.parameters():
        weight.data.normal_(std=0.3)
    return module


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [
        *(("gpt_oss", rows, torch.float32) for rows in (1, 3, 70)),
        *(("qwen3_moe", rows, torch.bfloat16) for rows in (1, 3, 70)),
        ("gpt_oss", 3, torch.bfloat16),
        ("mixtral", 3, torch.float32),
    ],
)
def test_experts_give_what_the_models_own_loop_gives(
    name: str, rows: int, dtype: torch.dtype
) -> None:
    module = experts_of(name, dtype)
    width = module.config.hidden_size
    hidden = torch.randn(rows, width, device=DEVICE, dtype=dtype)
    shares, chosen = torch.randn(rows, module.num_experts, device=DEVICE).softmax(-1).topk(2)
    module.config._experts_implementation = "eager"
    expected = module(hidden, chosen, shares.to(dtype))
    with torch.inference_mode():
        given = mixed(module, hidden, chosen, shares.to(dtype))
    limit = 1e-5 if dtype == torch.float32 else 3e-2  # the interpreter cuts bfloat16 numbers
    assert given.dtype == dtype
    assert (given - expected).abs().max() <= limit * expected.abs().max()


def test_experts_of_other_kinds_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts_of("qwen3_moe", torch.float32)
    asked: list[Any] = []
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", lambda *given: asked.append(given))
    module._is_expert_parallel = True
    mixed(module, torch.zeros(1, 8), torch.zeros(1, 2), torch.zeros(1, 2))
    assert len(asked) == 1
