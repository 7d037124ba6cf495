"""Linear layers whose weights are also kept as the CPU's matrix units want them.

With a plain weight, oneDNN rearranges it on every call. For few rows (a decode step, the tail
after a hit, what is repaired of moved text) that costs as much as the product itself, so those
rows meet a copy that was rearranged once. Many rows meet the plain weight, in the very call stock
transformers makes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

FEW_ROWS = 384
MEMORY_SHARE = 0.25
"""The copies may take this share of the machine's memory; if they would take more, none is made."""


TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same rows one after the other: one larger product is faster than
several small ones."""


class PackedGroup:
    """The rearranged weights of linear layers that read the same rows, as one product. What the
    first of them asks for is kept until the last has it; one that brings other rows is computed
    anew. Rearranged weights have no ordinary strides, so they are neither moved nor saved with
    the model."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._sizes = [linear.out_features for linear in linears]
        self._rows: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def output(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """What the layer at ``index`` gives."""
        if self._rows is not rows:
            out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            if len(self._sizes) == 1:
                return out
            self._rows, self._outputs = rows, out.split(self._sizes, -1)
        result = self._outputs[index]
        if index + 1 == len(self._sizes):
            self._rows, self._outputs = None, ()
        return result


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference, the one at ``index`` of its ``group``."""

    def __init__(self, linear: nn.Linear, group: PackedGroup | None = None, index: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._group = group or PackedGroup([linear])
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > FEW_ROWS * self.in_features:
            return nn.functional.linear(rows, self.weight, self.bias)
        return self._group.output(rows, self._index)


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
        if type(getattr(parent, name)) is nn.Linear:  # not taken along by an earlier one
            _pack_in(parent, name, {id(one) for _, _, one in found}, child)
    return len(found)


def _pack_in(parent: nn.Module, name: str, allowed: set[int], child: nn.Linear) -> None:
    """Replaces a layer of ``parent``, together with those that read the same rows."""
    names = next((group for group in TOGETHER if name in group), (name,))
    linears = [getattr(parent, one, None) for one in names]
    fitting = all(
        type(one) is nn.Linear
        and id(one) in allowed
        and one.in_features == child.in_features
        and (one.bias is None) == (child.bias is None)
        for one in linears
    )
    if not fitting:
        names, linears = (name,), [child]
    group = PackedGroup(linears)  # type: ignore[arg-type]
    for index, (one, linear) in enumerate(zip(names, linears, strict=True)):
        setattr(parent, one, PackedLinear(linear, group, index))  # type: ignore[arg-type]


def memory_bytes() -> int:
    """The memory of this machine; nothing, where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
