"""Products with quantised weights against torch, over the same rounded rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear, silu

from kvboost.model import native
from kvboost.model.native.quantized_product import QuantizedProduct, can_multiply_quantized, why_not
from kvboost.model.quantized.weight import QuantizedWeight

pytestmark = pytest.mark.skipif(
    not native.is_available(torch.float32), reason="no float32 kernels on this machine"
)


def random_weight(
    n: int, k: int, *, bits: int = 4, group: int = 32, offsets: str = "own", dtype: str = "float16"
) -> QuantizedWeight:
    """With 6 bits, codes of 8 bits that are all small."""
    generator = torch.Generator().manual_seed(n + k + bits + group)
    limit = 1 << (bits - 1)
    if bits == 4:
        codes = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    else:
        codes = torch.randint(-limit, limit, (n, k), generator=generator).to(torch.int8)
    scales = (torch.rand(n, k // group, generator=generator) + 0.5).to(getattr(torch, dtype)) / 64
    own = {
        "none": None,
        "centred": scales * -limit,
        "own": torch.randn(scales.shape, generator=generator).to(scales.dtype) / 8,
    }
    return QuantizedWeight(codes, scales, own[offsets], 4 if bits == 4 else 8, group)


def random_rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * 3


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the kernels round them: 8 bits in groups of 32."""
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    scales = (scales.view(torch.int32) & ~3).view(torch.float32)  # 22 bits: sums are exact
    times = torch.where(scales > 0, 1 / scales, 0)
    return ((blocks * times).round() * scales).reshape(rows.shape)


def half_steps(rows: torch.Tensor) -> torch.Tensor:
    """What the second code of each number can be off by at most, with 1 % for float32."""
    largest = rows.reshape(*rows.shape[:-1], -1, 32).abs().amax(-1)
    return (largest / 127 / 256 * 1.01).repeat_interleave(32, dim=-1)


def assert_close(
    given: torch.Tensor, rows: torch.Tensor, weight: QuantizedWeight, *, fine: bool = False
) -> None:
    """Equal to the product of the rounded rows, to 2e-6 of the size of what is added up. With two
    codes, equal to the product of the rows, to what rounding the second can change."""
    dense = weight.dequantized()
    allowed = 2e-6 * (rows.abs() @ dense.abs().t())
    if fine:
        allowed += half_steps(rows) @ dense.abs().t()
    expected = (rows if fine else rounded(rows)).double() @ dense.double().t()
    assert ((given.double() - expected).abs() <= allowed).all()


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 5),
    units=st.integers(1, 4),
    bits=st.sampled_from([4, 6, 8]),
    group=st.sampled_from([16, 32, 64, 96, 128]),
    offsets=st.sampled_from(["none", "centred", "own"]),
    dtype=st.sampled_from(["float16", "float32"]),
    fine=st.booleans(),
)
def test_a_product_equals_torchs_over_rounded_rows(
    m: int, n: int, units: int, bits: int, group: int, offsets: str, dtype: str, fine: bool
) -> None:
    k = units * max(group, 32)
    weight = random_weight(n * 16, k, bits=bits, group=group, offsets=offsets, dtype=dtype)
    rows = random_rows(m, k)
    assert can_multiply_quantized(weight)
    assert_close(QuantizedProduct(weight, fine=fine)(rows), rows, weight, fine=fine)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_the_rows_costs_half_a_percent(bits: int) -> None:
    """Of the product's size, for normal rows and weights that are centred on zero."""
    weight = random_weight(256, 1024, bits=bits, offsets="centred" if bits == 4 else "none")
    rows = random_rows(4, 1024)
    exact = linear(rows, weight.dequantized())
    error = (QuantizedProduct(weight)(rows) - exact).norm() / exact.norm()
    assert 0.002 < error < 0.0065
    fine = (QuantizedProduct(weight, fine=True)(rows) - exact).norm() / exact.norm()
    assert 50 * fine < error  # 128 times as many steps


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_a_product_does_not_depend_on_the_rows_beside_it(bits: int, group: int, fine: bool) -> None:
    """Rows in blocks and rows alone add up the same numbers in the same order."""
    weight = random_weight(48, 2304, bits=bits, group=group)
    product = QuantizedProduct(weight, fine=fine)
    rows = random_rows(150, 2304)
    together = product(rows)
    assert_close(together, rows, weight, fine=fine)
    for first, count in ((0, 1), (3, 2), (0, 7), (16, 13), (20, 129)):
        part = rows[first : first + count]
        assert torch.equal(product(part), together[first : first + count])


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("fine", [False, True])
def test_a_gated_product(rows: int, with_bias: bool, fine: bool) -> None:
    weights = random_weight(48, 64), random_weight(48, 64, bits=8, group=16)
    bias = torch.randn(96) if with_bias else None
    biases = (None, None) if bias is None else bias.split(48)
    x = random_rows(rows, 64)
    first, second = (
        QuantizedProduct(weight, own, fine=fine)(x)
        for weight, own in zip(weights, biases, strict=True)
    )
    given = QuantizedProduct(weights, bias, gated=True, fine=fine)(x)
    assert torch.allclose(given, silu(first) * second, rtol=1e-4, atol=1e-4)


def test_weights_of_several_kinds_are_one_product() -> None:
    parts = [random_weight(64, 96), random_weight(16, 96, bits=8, group=16), random_weight(32, 96)]
    bias = torch.randn(112)
    x = random_rows(5, 96)
    for fine in (False, True):
        product = QuantizedProduct(parts, bias, fine=fine)
        assert (product.width, product.depth) == (112, 96)
        alone = torch.cat([QuantizedProduct(part, fine=fine)(x) for part in parts], dim=-1)
        assert torch.equal(product(x), alone + bias)
        assert torch.equal(product.part(1)(x), alone[:, 64:80])


def test_rows_of_other_types_and_strides() -> None:
    weight = random_weight(32, 64)
    product = QuantizedProduct(weight)
    wide = random_rows(64, 6).t()
    assert torch.equal(product(wide), product(wide.contiguous()))
    for dtype in (torch.bfloat16, torch.float16):
        rows = random_rows(3, 64).to(dtype)[None]
        given = product(rows)
        assert given.dtype == dtype and given.shape == (1, 3, 32)
        assert torch.equal(given, product(rows.float()).to(dtype))


@pytest.mark.parametrize(("bits", "code"), [(4, 255), (8, -128), (8, 127), (8, -32)])
@pytest.mark.parametrize("group", [16, 32])
def test_the_largest_sums(bits: int, code: int, group: int) -> None:
    weight = random_weight(16, 64, bits=bits, group=group)
    weight.codes.fill_(code)
    rows = torch.ones(5, 64) * torch.tensor([[1.0], [-1.0], [1e30], [1e-30], [3.0]])
    assert_close(QuantizedProduct(weight)(rows), rows, weight)


def test_rows_of_zeros() -> None:
    assert torch.equal(
        QuantizedProduct(random_weight(16, 32))(torch.zeros(2, 32)), torch.zeros(2, 16)
    )


def test_memory_is_that_of_codes_and_scales() -> None:
    """Offsets that follow from the scales take none, and float32 only what float16 would round."""
    n, k = 64, 256
    bits = lambda weight: QuantizedProduct(weight).num_bytes * 8 / (n * k)  # noqa: E731
    assert bits(random_weight(n, k)) == 5
    assert bits(random_weight(n, k, offsets="centred")) == 4.5
    assert bits(random_weight(n, k, group=128)) == 4.25
    assert bits(random_weight(n, k, bits=8, group=16, offsets="none")) == 9
    assert bits(random_weight(n, k, bits=6, group=16, offsets="none")) == 7
    assert bits(random_weight(n, k, dtype="float32")) == 6
    exact = random_weight(n, k)
    assert exact.offsets is not None
    wide = QuantizedWeight(exact.codes, exact.scales.float(), exact.offsets.float(), 4, 32)
    assert bits(wide) == 5


def test_weights_without_a_kernel() -> None:
    refused = {
        random_weight(24, 32): "multiple of 16",
        random_weight(16, 48, group=16): "columns of 32",
        random_weight(16, 96, group=48): "groups of 48",
    }
    for weight, reason in refused.items():
        assert reason in str(why_not(weight)) and not can_multiply_quantized(weight)
        with pytest.raises(ValueError, match=reason):
            QuantizedProduct(weight)
    good = random_weight(16, 32)
    with pytest.raises(ValueError, match="3 bits"):
        QuantizedProduct(QuantizedWeight(good.codes, good.scales, None, 3, 32))
    with pytest.raises(ValueError, match="finite"):
        QuantizedProduct(QuantizedWeight(good.codes, good.scales * float("inf"), None, 4, 32))
    with pytest.raises(ValueError, match="same shape"):
        QuantizedProduct((good, random_weight(32, 32)), gated=True)
    with pytest.raises(ValueError, match="as many columns"):
        QuantizedProduct((good, random_weight(16, 64)))
    assert not can_multiply_quantized(good, torch.float16)
