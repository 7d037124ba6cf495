"""On CPUs with AMX, quantised weights are expanded to bfloat16 for many rows."""

from __future__ import annotations

import pytest
import torch

from kvboost.model import native
from kvboost.model.native.quantized_product import QuantizedProduct
from kvboost.model.quantized.weight import QuantizedWeight

FEW_ROWS = 48
"""At most so many are multiplied with the codes, after they were rounded."""

pytestmark = pytest.mark.skipif(
    not native.is_available(torch.bfloat16), reason="no CPU with AMX, or no compiler"
)


def weight(bits: int, group: int, offsets: bool, n: int = 64, k: int = 160) -> QuantizedWeight:
    random = torch.Generator().manual_seed(bits * group)
    codes = torch.randint(0, 256, (n, k * (4 if bits == 4 else 8) // 8), generator=random)
    codes = codes.to(torch.uint8)
    if bits != 4:
        codes = (codes.view(torch.int8) >> (8 - bits)).contiguous()
    scales = torch.rand(n, k // group, generator=random).half() / 64
    given = torch.rand(n, k // group, generator=random).half() / 8 if offsets else None
    return QuantizedWeight(codes, scales, given, 4 if bits == 4 else 8, group)


@pytest.mark.parametrize(
    ("bits", "group", "offsets"),
    [(4, 32, True), (4, 160, False), (6, 16, False), (6, 32, True), (8, 16, True), (8, 32, False)],
)
@pytest.mark.parametrize("fine", [False, True])
def test_many_rows_equal_the_product_with_bfloat16_weights(
    bits: int, group: int, offsets: bool, fine: bool
) -> None:
    given = weight(bits, group, offsets)
    bias = torch.randn(64).bfloat16()
    product = QuantizedProduct(given, bias, fine=fine, dtype=torch.bfloat16)
    rows = torch.randn(FEW_ROWS + 35, 160).bfloat16()
    expanded = given.dequantized().bfloat16().double()
    expected = rows.double() @ expanded.t() + bias.double()
    error = (product(rows).double() - expected).abs()
    assert bool((error <= 2**-8 * expected.abs() + 1e-4 * expected.abs().max()).all())
    few = product(rows[:FEW_ROWS]).double() - expected[:FEW_ROWS]
    assert float(few.norm() / expected.norm()) < 0.02, "rounding of rows, not another product"


def test_many_rows_of_a_gated_product_and_an_odd_number_of_columns() -> None:
    gate, up = weight(4, 32, True), weight(6, 16, False)
    rows = torch.randn(100, 160).bfloat16()
    gates, values = (rows.double() @ part.dequantized().double().t() for part in (gate, up))
    expected = torch.nn.functional.silu(gates) * values
    found = QuantizedProduct((gate, up), gated=True, dtype=torch.bfloat16)(rows)
    assert torch.allclose(found.double(), expected, atol=0.02 * float(expected.abs().max()))
    narrow = weight(4, 32, True, n=48)  # tiles have 32 columns: these are multiplied as few rows
    found = QuantizedProduct(narrow, dtype=torch.bfloat16)(rows)
    expected = rows.double() @ narrow.dequantized().double().t()
    assert torch.allclose(found.double(), expected, atol=0.02 * float(expected.abs().max()))
