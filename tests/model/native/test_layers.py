"""Our products and norms against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from kvboost.model.native.layers import Product, can_halve, can_multiply, can_norm, rms_norm
from support.kernel_forms import close, each_dtype

FLOAT32 = torch.float32


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each_dtype
@pytest.mark.parametrize(("n", "k"), [(32, 32), (96, 64), (576, 1536), (3072, 96)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_equals_torchs(dtype: torch.dtype, n: int, k: int, with_bias: bool) -> None:
    weight = random(n, k, dtype=dtype, seed=1)
    bias = random(n, dtype=dtype, seed=2) if with_bias else None
    product = Product(weight, bias)
    assert not product.is_halved
    for rows in (1, 2, 3, 7, 12, 13, 16, 17, 32, 33, 100, 200):
        x = random(1, rows, k, dtype=dtype)
        expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
        given = product(x)
        assert given.shape == expected.shape and given.dtype == dtype
        assert close(given, expected, 6), rows


@pytest.mark.parametrize("with_bias", [True, False])
def test_halved_weights_lose_nothing(with_bias: bool) -> None:
    """float32 weights that are bfloat16 numbers: the products are the same to the bit."""
    if not can_multiply(torch.zeros(32, 32)):
        pytest.skip("no float32 kernels")
    weight = random(64, 160, dtype=torch.bfloat16, seed=1).float()
    other = weight.clone()
    other[63, 159] += 2**-20  # one number that bfloat16 does not have
    bias = random(64, dtype=FLOAT32, seed=2) if with_bias else None
    halved, whole = Product(weight, bias), Product(other, bias)
    assert halved.is_halved and not whole.is_halved
    for rows in (1, 5, 12, 40, 60, 130):
        x = random(rows, 160, dtype=FLOAT32)
        assert close(halved(x), linear(x, weight, bias), 6), rows
        assert torch.equal(whole(x)[:, :63], halved(x)[:, :63]), rows


def test_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    """In float32: rows in blocks and rows alone add up the same numbers in the same order."""
    if not can_multiply(torch.zeros(32, 32)):
        pytest.skip("no float32 kernels")
    x = random(200, 320, dtype=FLOAT32)
    for weight in (
        random(64, 320, dtype=FLOAT32, seed=1).bfloat16().float(),
        random(64, 320, dtype=FLOAT32, seed=1),
    ):
        product = Product(weight)
        together = product(x)
        for rows in (*(x[:count] for count in range(1, 26)), x[:40], x[:97]):
            assert torch.equal(product(rows), together[: len(rows)])


@each_dtype
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_gated_product_equals_torchs(dtype: torch.dtype, with_bias: bool) -> None:
    gate, up = (random(96, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    biases = tuple(random(96, dtype=dtype, seed=seed) for seed in (3, 4)) if with_bias else ()
    product = Product.gated(gate, up, biases)
    for rows in (1, 8, 40):
        x = random(rows, 64, dtype=dtype)
        first, second = (
            linear(x, weight, bias)
            for weight, bias in zip((gate, up), biases or (None, None), strict=True)
        )
        expected = silu(first) * second
        assert torch.allclose(product(x), expected, rtol=2**-5, atol=2**-4), rows
        assert dtype != FLOAT32 or close(product(x), expected, 6), rows


@each_dtype
def test_gates_that_are_far_open_and_far_shut(dtype: torch.dtype) -> None:
    weight = torch.eye(32).to(dtype)
    x = torch.linspace(-300, 300, 32).to(dtype)[None]
    given = Product.gated(weight, weight)(x)
    assert close(given, silu(x) * x, 6)


@each_dtype
def test_a_norm_equals_transformers(dtype: torch.dtype) -> None:
    x, weight = random(1, 40, 96, dtype=dtype) * 5, random(96, dtype=dtype, seed=1)
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    assert close(rms_norm(x, weight, 1e-5), weight * scaled, 7)


@each_dtype
def test_rows_that_are_not_contiguous(dtype: torch.dtype) -> None:
    weight, x = random(64, 32, dtype=dtype, seed=1), random(32, 40, dtype=dtype).t()
    assert torch.equal(Product(weight)(x), Product(weight)(x.contiguous()))
    assert torch.equal(rms_norm(x, weight[0], 1e-6), rms_norm(x.contiguous(), weight[0], 1e-6))


@each_dtype
def test_weights_without_a_kernel(dtype: torch.dtype) -> None:
    assert can_multiply(random(64, 32, dtype=dtype))
    assert not can_multiply(random(64, 40, dtype=dtype))
    assert not can_multiply(random(40, 32, dtype=dtype))
    assert can_norm(random(64, dtype=dtype)) and not can_norm(random(40, dtype=dtype))
    half = random(64, 32, dtype=torch.float16)
    assert not can_multiply(half) and not can_norm(half[:, 0])
    assert not can_halve(half) and not can_halve(nn.Linear(4, 64).weight)
