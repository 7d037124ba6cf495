"""Linear layers whose weights are laid out once for the CPU's matrix units.

With a plain weight, oneDNN rearranges it on every call. For few rows (a decode step, the tail
after a hit) that costs more than the product itself. Results are the same to the bit.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference. The packed weight has no ordinary strides, so it is neither
    moved nor saved with the model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self.bias, "none", [], ""
        )
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of ``model``; returns how many. A weight that is used elsewhere
    too (an output head tied to the embedding) stays as it is."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and owners[id(child.weight)] == 1:
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed
