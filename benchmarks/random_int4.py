"""Models with random weights of 4 bits: speed depends on shapes, not on weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from benchmarks.shapes import config_of
from kvboost.model.quantized.cuda import int4_product

GROUP = 128
"""Weights that share a scale, as in AWQ and GPTQ checkpoints."""
TILES = 8
TINY_LAYERS = 16
"""The shape has two, and two slots hold as many."""
_SCALE = 0.003


class Int4Linear(nn.Module):
    """torch's int4 product on NVIDIA GPUs. ``codes`` are as ``_convert_weight_to_int4pack`` makes
    them, but random."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = k, n = like.in_features, like.out_features
        shape = (n // 8, k // (16 * TILES), 32, TILES // 2)
        self.register_buffer("codes", _random_codes(shape))
        scales = torch.tensor([_SCALE, 0.0], dtype=torch.bfloat16)
        self.register_buffer("scales", scales.repeat(k // GROUP, n, 1))
        bias = torch.zeros(n, dtype=torch.bfloat16)
        has_bias = like.bias is not None
        self.register_parameter("bias", nn.Parameter(bias, False) if has_bias else None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return int4_product(rows, self.codes, GROUP, self.scales, self.bias)


def _random_codes(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def random_model(shape: str, dtype: torch.dtype, *, quantized: bool) -> Any:
    """A transformers model in host memory. All decoder layers share the memory of the first, so
    making it takes seconds; a copy of a layer has memory of its own."""
    from transformers import Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    more = {"num_hidden_layers": TINY_LAYERS} if shape == "tiny" else {}
    config = config_of(shape, **more)
    config.dtype = dtype
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config)
    _fill_others(model, dtype)
    model.model.rotary_emb = Qwen2RotaryEmbedding(config)
    first = model.model.layers[0]
    if quantized:
        for parent in (first.self_attn, first.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Int4Linear(child))
    _fill(first, dtype)
    for number in range(1, len(model.model.layers)):
        model.model.layers[number] = _twin(first, number, config)
    return model.eval()


def _fill_others(model: Any, dtype: torch.dtype) -> None:
    """Embedding, head and last norm."""
    for module in (model.model.embed_tokens, model.lm_head, model.model.norm):
        _fill(module, dtype)
    model.tie_weights()


def _fill(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters without memory some random rows, which repeat."""
    for owner in module.modules():
        for name, weight in list(owner._parameters.items()):
            if weight is None or not weight.is_meta:
                continue
            if weight.ndim < 2:
                filled = torch.full(weight.shape, float(name == "weight"), dtype=dtype)
            else:
                rows = torch.randn(min(1024, len(weight)), weight.shape[1]) * 0.02
                times = -(-len(weight) // len(rows))
                filled = rows.to(dtype).repeat(times, 1)[: len(weight)].contiguous()
            owner._parameters[name] = nn.Parameter(filled, requires_grad=False)


def _twin(first: Any, number: int, config: Any) -> Any:
    """The layer ``first`` as number ``number``: with parameters and buffers of its own, in the same
    memory."""
    memo: dict[int, Any] = {id(config): config}
    for weight in first.parameters():
        memo[id(weight)] = nn.Parameter(weight.data, requires_grad=False)
    for buffer in first.buffers():
        memo[id(buffer)] = buffer.view(buffer.shape)
    twin = copy.deepcopy(first, memo)
    twin.self_attn.layer_idx = number
    return twin
