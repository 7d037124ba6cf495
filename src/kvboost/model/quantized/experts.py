"""Experts of transformers' models whose weights stay in MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from kvboost.model import triton
from kvboost.model.quantized.mxfp4 import Mxfp4Weight

PRODUCTS = ("gate_up_proj", "down_proj")
"""The weights of a module with experts, as transformers names them."""
DTYPES = (torch.bfloat16, torch.float32)
"""Of rows that kernels multiply: all weights are exact in them."""


class PackedExperts:
    """What makes a module's experts packed. Its weights are buffers of codes and scales; who reads
    ``gate_up_proj`` or ``down_proj`` gets them expanded, ``[experts, in, out]`` in the dtype of the
    biases. So the products of transformers stay right: they are slow, and for as long as they run,
    they take the memory of a layer's plain experts."""

    hidden_size: int
    intermediate_size: int
    down_proj_bias: torch.Tensor

    def packed(self, name: str) -> Mxfp4Weight:
        """One of ``PRODUCTS``."""
        depth = self.hidden_size if name == "gate_up_proj" else self.intermediate_size
        return Mxfp4Weight(getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales"), depth)

    @property
    def gate_up_proj(self) -> torch.Tensor:
        return self._expanded("gate_up_proj")

    @property
    def down_proj(self) -> torch.Tensor:
        return self._expanded("down_proj")

    def _expanded(self, name: str) -> torch.Tensor:
        return self.packed(name).expanded(self.down_proj_bias.dtype).transpose(1, 2)


def pack_experts(module: nn.Module, weights: dict[str, Mxfp4Weight]) -> PackedExperts:
    """Puts ``weights`` in the place of the parameters with these names."""
    for name, weight in weights.items():
        delattr(module, name)
        module.register_buffer(f"{name}_codes", weight.codes)
        module.register_buffer(f"{name}_scales", weight.scales)
    kind: Any = type(module)
    module.__class__ = _packed_class(kind)
    return cast(PackedExperts, module)


@cache
def _packed_class(kind: Any) -> Any:
    return type(f"Packed{kind.__name__}", (PackedExperts, kind), {})


def packed_experts(model: nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            yield name, module


def num_packed(model: nn.Module, *, in_bytes: bool = False) -> int:
    """The number of weights of packed experts, or of their bytes."""
    weights = [each.packed(name) for _, each in packed_experts(model) for name in PRODUCTS]
    if in_bytes:
        return sum(weight.nbytes for weight in weights)
    return sum(torch.Size(weight.shape).numel() for weight in weights)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels that multiply rows of ``dtype`` with packed experts."""
    return triton.serves(device) and dtype in DTYPES


def kernel_of(experts: Any) -> str:
    """The name of what multiplies with packed experts, for people."""
    bias = experts.down_proj_bias
    return "triton, MXFP4" if has_kernels(bias.device, bias.dtype) else "torch, MXFP4 expanded"
