"""Products with quantised codes, and the weights that they stand for."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.quantized.weight import QuantizedWeight
from kvboost.model.triton.codes import expand_codes, multiply_codes
from support.tiny import DEVICE


def weight(bits: int, group: int, offsets: bool, n: int = 40, k: int = 160) -> QuantizedWeight:
    random = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=random)
    scales = torch.rand(n, k // group, generator=random).half() / 64
    given = torch.rand(n, k // group, generator=random).half() / 8 if offsets else None
    made = QuantizedWeight(
        codes if bits == 4 else codes.view(torch.int8), scales, given, bits, group
    )
    return made.to(torch.device(DEVICE))


HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16
"""Triton's interpreter multiplies no bfloat16 numbers."""
KINDS = [(8, 16, False), (8, 32, True), (4, 32, True), (4, 160, False)]


@pytest.mark.parametrize(("bits", "group", "offsets"), KINDS)
@pytest.mark.parametrize("rows", [1, 19])
def test_rows_are_multiplied_with_codes(bits: int, group: int, offsets: bool, rows: int) -> None:
    given = weight(bits, group, offsets)
    x = torch.randn(1, rows, 160, device=DEVICE)
    bias = torch.randn(40, device=DEVICE) if offsets else None
    parts = (given.codes, given.scales, given.offsets, bits, group)
    found = multiply_codes(x, *parts, bias)
    expected = torch.nn.functional.linear(x, given.dequantized(), bias)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    alone = multiply_codes(x[:, :1], *parts, bias)
    assert torch.equal(alone, found[:, :1]), "a row does not depend on those beside it"
    half = multiply_codes(x.to(HALF), *parts, None if bias is None else bias.to(HALF))
    error = (half.float() - expected).norm() / expected.norm()
    assert half.dtype == HALF and float(error) < 0.01


@pytest.mark.parametrize(("bits", "group", "offsets"), KINDS)
def test_weights_are_expanded(bits: int, group: int, offsets: bool) -> None:
    given = weight(bits, group, offsets, n=3, k=1120)  # more than a program expands
    for dtype in (torch.float32, torch.bfloat16):
        found = expand_codes(given.codes, given.scales, given.offsets, bits, group, dtype)
        expected = given.dequantized()
        assert found.dtype == dtype and found.shape == (3, 1120)
        assert torch.allclose(found.float(), expected, rtol=2**-7, atol=1e-6)
