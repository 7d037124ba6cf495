from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from kvboost.model.native.build import load_library
from kvboost.model.native.layers import Product, can_multiply, can_norm, rms_norm

pytestmark = pytest.mark.skipif(
    isinstance(load_library(), str), reason=f"no native kernels: {load_library()}"
)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 100])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (96, 64), (576, 1536), (3072, 96)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_is_what_torch_gives(rows: int, n: int, k: int, with_bias: bool) -> None:
    x, weight, bias = random(1, rows, k), random(n, k, seed=1), random(n, seed=2)
    given = Product(weight, bias if with_bias else None)(x)
    expected = linear(x.float(), weight.float(), bias.float() if with_bias else None)
    assert given.shape == expected.shape and given.dtype == torch.bfloat16
    assert torch.allclose(given.float(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_gate_lets_through_what_it_does_in_torch(rows: int, with_bias: bool) -> None:
    x, gate, up = random(rows, 64), random(96, 64, seed=1), random(96, 64, seed=2)
    biases = (random(96, seed=3), random(96, seed=4)) if with_bias else ()
    given = Product.gated(gate, up, biases)(x)
    first, second = (
        linear(x, weight, bias)
        for weight, bias in zip((gate, up), biases or (None, None), strict=True)
    )
    assert torch.allclose(given, silu(first) * second, rtol=2**-5, atol=2**-4)


def test_a_gate_far_open_and_far_shut() -> None:
    weight = torch.eye(32).bfloat16()
    x = torch.linspace(-300, 300, 32).bfloat16()[None]
    given = Product.gated(weight, weight)(x)
    assert torch.allclose(given, silu(x) * x, rtol=2**-6)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_norm_is_what_transformers_gives(rows: int) -> None:
    x, weight = random(1, rows, 96) * 5, random(96, seed=1)
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.allclose(rms_norm(x, weight, 1e-5), weight * scaled, rtol=2**-7)


def test_rows_that_do_not_lie_in_one_piece() -> None:
    weight, x = random(64, 32, seed=1), random(32, 40).t()
    assert torch.equal(Product(weight)(x), Product(weight)(x.contiguous()))
    assert torch.equal(rms_norm(x, weight[0], 1e-6), rms_norm(x.contiguous(), weight[0], 1e-6))


def test_weights_for_which_there_is_no_kernel() -> None:
    assert can_multiply(random(64, 32))
    assert not can_multiply(random(64, 40)) and not can_multiply(random(40, 32))
    assert not can_multiply(random(64, 32).float())
    assert can_norm(random(64)) and not can_norm(random(40)) and not can_norm(nn.Linear(4, 64).bias)
