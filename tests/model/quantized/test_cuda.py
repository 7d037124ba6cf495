"""What torch's int4 product is given. The product itself needs an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

from kvboost import ConfigError, KVBoost
from kvboost.checks.doctor import examine
from kvboost.model.quantized.cuda import (
    TensorCoreProduct,
    has_tensor_cores,
    packed_tiles,
    scales_and_zeros,
)
from kvboost.model.quantized.weight import QuantizedWeight

needs_gpu = pytest.mark.skipif(
    not has_tensor_cores(torch.device("cuda"), torch.bfloat16)
    if torch.cuda.is_available()
    else True,
    reason="no NVIDIA GPU with bfloat16",
)


def weight(n: int, k: int, group: int, bits: int = 4, offsets: bool = True) -> QuantizedWeight:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=random)
    scales = torch.rand(n, k // group, generator=random) / 64
    given = torch.rand(n, k // group, generator=random) / 8 if offsets else None
    return QuantizedWeight(
        codes if bits == 4 else codes.view(torch.int8), scales, given, bits, group
    )


@pytest.mark.parametrize("offsets", [True, False])
def test_scales_and_zeros_give_the_weight(offsets: bool) -> None:
    given = weight(16, 128, 32, offsets=offsets)
    both = scales_and_zeros(given).float()
    assert both.shape == (4, 16, 2)
    codes = torch.stack([given.codes & 15, given.codes >> 4], dim=-1).reshape(16, 4, 32)
    made = (codes - 8.0) * both[..., 0].t()[..., None] + both[..., 1].t()[..., None]
    expected = given.dequantized()
    assert torch.allclose(made.reshape(16, 128), expected, atol=2**-7 * float(expected.abs().max()))


def test_which_weights_the_int4_product_takes() -> None:
    assert packed_tiles(weight(16, 1536, 32)) == 8
    assert packed_tiles(weight(16, 96, 32)) == 2
    assert packed_tiles(weight(12, 128, 32)) is None  # rows come in eights
    assert packed_tiles(weight(16, 128, 16)) is None
    assert packed_tiles(weight(16, 128, 32, bits=8)) is None
    assert not has_tensor_cores(torch.device("cpu"), torch.bfloat16)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_on_a_gpu_equals_that_of_the_dequantised_weight(rows: int, bits: int) -> None:
    device = torch.device("cuda")
    given = weight(64, 256, 32, bits)
    bias = torch.randn(64).to(device, torch.bfloat16)
    product = TensorCoreProduct(given.to(device), bias)
    x = torch.randn(1, rows, 256).to(device, torch.bfloat16)
    expected = x.float() @ given.dequantized().to(device).t() + bias.float()
    assert torch.allclose(product(x).float(), expected, atol=0.03 * float(expected.abs().max()))


def test_doctor_says_what_multiplies_with_packed_weights() -> None:
    path = str(examine("smollm2-135m", "cpu", "float32").facts["quantised weights"])
    assert path.startswith(("yes: native kernels", "slow: "))


def test_packed_weights_are_for_one_device() -> None:
    with pytest.raises(ConfigError, match=r"one device, and tp_size is 2.*'plain'"):
        KVBoost.from_pretrained("smollm2-135m", tp_size=2, weights="packed")
