"""The rotation of a model in vLLM. vLLM itself is not needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.rope import rotation


class RotaryEmbedding(nn.Module):
    def __init__(self, base: float, *, is_neox_style: bool = True) -> None:
        super().__init__()
        self.base, self.is_neox_style, self.rotary_dim = base, is_neox_style, 8

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return base ** -(torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    scaling_factor = 4.0

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return super()._compute_inv_freq(1e4) / base


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    pass


class Block(nn.Module):
    def __init__(self, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.rotary_emb, self.attn = rotary_emb, nn.Identity()


def model_of(*positions: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    blocks = [Block(one) for one in positions]
    return nn.ModuleList(blocks), [block.attn for block in blocks]


def test_each_layer_rotates_as_the_block_around_it() -> None:
    near, far = RotaryEmbedding(1e4), YaRNScalingRotaryEmbedding(1e6)
    found = rotation(*model_of(near, far, near))
    assert found.kinds[0] == found.kinds[2] != found.kinds[1]
    slow = near._compute_inv_freq(1e4)
    for layer, factor in enumerate((1, 4, 1)):
        assert torch.allclose(found.frequencies[layer].float(), slow / factor)


def test_modules_that_are_alike_need_no_block() -> None:
    model = nn.ModuleList([RotaryEmbedding(1e4), RotaryEmbedding(1e4)])
    found = rotation(model, [nn.Identity()] * 3)
    assert found.frequencies.shape == (3, 4) and len(set(found.kinds)) == 1


def test_modules_that_differ_in_scale_alone_are_not_alike() -> None:
    near, far = YaRNScalingRotaryEmbedding(1e4), YaRNScalingRotaryEmbedding(1e4)
    far.scaling_factor = 8.0
    found = rotation(*model_of(near, far))
    assert found.kinds[0] != found.kinds[1]


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no rotary positions"):
        rotation(nn.Identity(), [nn.Identity()])
    model, layers = model_of(RotaryEmbedding(1e4), RotaryEmbedding(1e6))
    with pytest.raises(UnsupportedModelError, match="which layer has which"):
        rotation(model, [*layers, nn.Identity()])
    with pytest.raises(UnsupportedModelError, match="2 kinds"):
        rotation(*model_of(RotaryEmbedding(1e4), RotaryEmbedding(1e4, is_neox_style=False)))
    with pytest.raises(UnsupportedModelError, match="DynamicNTK"):
        rotation(*model_of(DynamicNTKScalingRotaryEmbedding(1e4)))
