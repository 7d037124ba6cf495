"""Experts that stay in MXFP4, against the same numbers written out and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvboost.errors import ModelError
from kvboost.model.quantized.mxfp4 import Mxfp4Weight
from support.mxfp4 import numbers_in, random_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("inputs", [32, 96, 128, 160, 256])
def test_a_weight_has_the_numbers_of_its_blocks(inputs: int) -> None:
    blocks, scales = random_blocks(3, 24, inputs)
    weight = Mxfp4Weight.of(blocks, scales, CPU)
    assert weight.shape == (3, 24, inputs) and weight.num_experts == 3
    expected = numbers_in(blocks, scales)
    assert torch.equal(weight.expanded(torch.float32), expected)
    of_transformers = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(weight.expanded(torch.bfloat16).transpose(1, 2), of_transformers)


def test_a_weight_takes_four_bits_and_a_quarter() -> None:
    blocks, scales = random_blocks(2, 8, 256)
    assert Mxfp4Weight.of(blocks, scales, CPU).nbytes == blocks.nbytes + scales.nbytes


@pytest.mark.parametrize("octet", [0, 1, 127, 128])
def test_any_scale_that_kernels_can_apply_is_kept(octet: int) -> None:
    blocks, scales = random_blocks(1, 4, 32)
    scales[0, 2] = octet
    weight = Mxfp4Weight.of(blocks, scales, CPU)
    assert torch.equal(weight.expanded(torch.float32), numbers_in(blocks, scales))


def test_a_larger_scale_is_refused() -> None:
    blocks, scales = random_blocks(1, 4, 32)
    scales[0, 2] = 130
    with pytest.raises(ModelError, match=r"2\*\*3, and weights stay packed up to 2\*\*1"):
        Mxfp4Weight.of(blocks, scales, CPU)
