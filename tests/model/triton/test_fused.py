"""What layers do between products, against the modules of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kvboost.model.triton import fused
from kvboost.model.triton.fused import add_norm, gate, rotate_and_write
from support import torch_kernels
from support.paged_kv import each_dtype, make_pages, random
from support.tiny import DEVICE


def norm_of(width: int, dtype: torch.dtype) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width, eps=1e-5)
    norm.weight.data = torch.randn(width)
    return norm.to(DEVICE, dtype)


def close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = 2e-6
    if given.dtype == torch.bfloat16:  # which the interpreter does not round, but cuts
        limit = 4e-2 if DEVICE == "cpu" else 1e-2
    return torch.allclose(given.float(), expected.float(), rtol=limit, atol=limit)


@each_dtype
@pytest.mark.parametrize("adds", [False, True])
def test_norms(dtype: torch.dtype, adds: bool) -> None:
    rows, added = random(3, 48, dtype=dtype), random(3, 48, dtype=dtype)
    norm = norm_of(48, dtype)
    given, summed = add_norm(rows, norm.weight, norm.variance_epsilon, added if adds else None)
    expected = rows + added if adds else rows
    assert close(summed, expected)
    assert close(given, norm(expected))
    given, _ = torch_kernels.add_norm(
        rows, norm.weight, norm.variance_epsilon, added if adds else None
    )
    assert close(given, norm(expected))


@each_dtype
def test_gates(dtype: torch.dtype) -> None:
    rows = random(3, 2 * 1100, dtype=dtype)
    expected = torch.nn.functional.silu(rows[:, :1100]) * rows[:, 1100:]
    assert close(gate(rows), expected) and close(torch_kernels.gate(rows), expected)


@pytest.mark.parametrize(
    ("dim", "dtype"), [(16, torch.float32), (24, torch.float32), (24, torch.bfloat16)]
)
@pytest.mark.parametrize(("norms", "many"), [(False, True), (True, False), (True, True)])
def test_rotating_and_writing(
    dim: int, dtype: torch.dtype, norms: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:
        monkeypatch.setattr(fused, "MANY_ROWS", 1)
        monkeypatch.setattr(fused, "ROWS", 2)
    heads, kv_heads, rows, page = 4, 2, 3, 8
    qkv = random(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.randn(rows, dim // 2).repeat(1, 2).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pages = make_pages(4, kv_heads, page, dim, dtype, "heads first")
    slots = torch.tensor([30, 1, 9], device=DEVICE)
    before, same_pages, same_qkv = pages.clone(), pages.clone(), qkv.clone()
    parts = qkv.clone().view(1, rows, -1, dim).transpose(1, 2)
    query, keys, values = parts.split((heads, kv_heads, kv_heads), 1)
    weights = None
    if norms:
        of_query, of_keys = norm_of(dim, dtype), norm_of(dim, dtype)
        query, keys = of_query(query), of_keys(keys)
        weights = of_query.weight.detach(), of_keys.weight.detach()
    query, keys = apply_rotary_pos_emb(query, keys, cos[None], sin[None])
    once = (cos, sin)
    if norms:  # each pair once, and pairs before rows in memory: as gpt-oss of transformers 5.17
        once = tuple(part[:, : dim // 2].t().contiguous().t() for part in once)
    given, *fresh = rotate_and_write(qkv, once, pages, slots, weights, 1e-5)
    written_out = torch_kernels.rotate_and_write(same_qkv, once, same_pages, slots, weights, 1e-5)
    assert all(map(close, written_out, (given, *fresh))) and close(same_pages, pages)
    assert close(given, query[0].transpose(0, 1))
    assert close(fresh[0], keys[0].transpose(0, 1))
    assert torch.equal(fresh[1], values[0].transpose(0, 1))
    written = torch.stack([pages[slot // page, :, slot % page] for slot in slots.tolist()])
    assert close(written[..., :dim], keys[0].transpose(0, 1))
    assert torch.equal(written[..., dim:], values[0].transpose(0, 1))
    for slot in slots.tolist():
        before[slot // page, :, slot % page] = pages[slot // page, :, slot % page]
    assert torch.equal(before, pages)
