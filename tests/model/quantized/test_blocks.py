"""Blocks of GGUF files against the package that defines them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.model import native
from kvboost.model.quantized import blocks as quantized_blocks
from kvboost.model.quantized.blocks import (
    FLOATS,
    expanded,
    readable_formats,
    weight_from_blocks,
)
from support.tiny import DEVICE

SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 numbers of a block are; in other formats at its beginning only."""
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Formats whose scales are float16 numbers; elsewhere they are products, which we round."""


def random_blocks(name: str, rows: int, blocks: int, seed: int, size: float = 0.1) -> np.ndarray:
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    made = random.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    for at in SCALES_AT.get(name, (0,)):
        scales = (random.standard_normal((rows, blocks, 1)) * size).astype("<f2")
        made[..., at : at + 2] = scales.view(np.uint8)
    return made.reshape(rows, -1)


@settings(max_examples=12)
@pytest.mark.parametrize("name", readable_formats())
@given(rows=st.integers(1, 9), blocks=st.integers(1, 4), seed=st.integers(0, 1000))
def test_codes_are_those_of_the_file(name: str, rows: int, blocks: int, seed: int) -> None:
    given = random_blocks(name, rows, blocks, seed)
    kind = GGMLQuantizationType[name]
    order = np.random.default_rng(seed).permutation(rows) if seed % 2 else None
    expected = torch.from_numpy(dequantize(given if order is None else given[order], kind))
    made = weight_from_blocks(given, kind, order)
    assert made.shape == tuple(expected.shape) and made.bits in (4, 8)
    assert made.codes.dtype == (torch.uint8 if made.bits == 4 else torch.int8)
    most = 0.0 if name in EXACT else 2**-10 * float(expected.abs().max())
    assert torch.allclose(made.dequantized(), expected, rtol=0, atol=most)


@settings(max_examples=5)
@pytest.mark.parametrize("name", readable_formats())
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 1000))
def test_kernels_and_torch_read_the_same(name: str, rows: int, blocks: int, seed: int) -> None:
    if native.any_library() is None:
        pytest.skip("no native kernels")
    given = random_blocks(name, rows, blocks, seed, size=10.0 ** (seed % 9 - 7))
    order = np.random.default_rng(seed).permutation(rows) if seed % 2 else None
    kind = GGMLQuantizationType[name]
    made = weight_from_blocks(given, kind, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_blocks, "read_blocks", lambda *_: False)
        expected = weight_from_blocks(given, kind, order)
    for part in ("codes", "scales", "offsets"):
        ours, theirs = getattr(made, part), getattr(expected, part)
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


@settings(max_examples=8)
@pytest.mark.parametrize("way", ["kernels", "torch"])
@pytest.mark.parametrize("name", [*readable_formats(), *(kind.name for kind in FLOATS), "IQ4_XS"])
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 1000))
def test_numbers_are_to_the_bit_those_of_the_file(
    name: str, way: str, rows: int, blocks: int, seed: int
) -> None:
    """On a GPU, torch reads the blocks in any case."""
    kind = GGMLQuantizationType[name]
    if kind in FLOATS:
        numbers = np.random.default_rng(seed).standard_normal((rows, 8 * blocks), np.float32)
        given = quantize(numbers, kind).view(np.uint8)
    else:
        given = random_blocks(name, rows, blocks, seed, size=10.0 ** (seed % 9 - 7))
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            patch.setattr(quantized_blocks, "read_blocks", lambda *_: False)
        made = expanded(given, kind, torch.device(DEVICE))
    expected = torch.from_numpy(dequantize(given, kind))
    assert made.dtype == torch.float32 and made.device.type == DEVICE
    assert torch.equal(made.cpu(), expected)
    if name != "Q4_0":  # whose zeros have the sign of the scale, and ours have none
        assert torch.equal(made.cpu().view(torch.int32), expected.view(torch.int32))


def test_scales_that_float16_cannot_hold_stay_wide() -> None:
    kind = GGMLQuantizationType.Q6_K
    assert weight_from_blocks(random_blocks("Q6_K", 2, 1, 0), kind).scales.dtype == torch.float16
    for size in (1e-7, 1e4):
        given = random_blocks("Q6_K", 2, 1, 0, size)
        made = weight_from_blocks(given, kind)
        assert made.scales.dtype == torch.float32
        assert torch.equal(made.dequantized(), torch.from_numpy(dequantize(given, kind)))
