"""Linear layers whose weights are also kept as the CPU's matrix units want them.

With a plain weight, oneDNN rearranges it on every call. For few rows (a decode step, the tail
after a hit) that costs as much as the product itself, so those rows meet a copy that was
rearranged once. Many rows meet the plain weight, in the very call stock transformers makes.
"""

from __future__ import annotations

import os

import torch
from torch import nn

FEW_ROWS = 64
MEMORY_SHARE = 0.25
"""The copies may take this share of the machine's memory; if they would take more, none is made."""


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference. The rearranged copy has no ordinary strides, so it is
    neither moved nor saved with the model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > FEW_ROWS * self.in_features:
            return nn.functional.linear(rows, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing does anything on this machine."""
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
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and owners[id(child.weight)] == 1
    ]
    copies = sum(child.weight.nbytes for _, _, child in found)
    if copies > MEMORY_SHARE * memory_bytes():
        return 0
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


def memory_bytes() -> int:
    """The memory of this machine; nothing, where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
