"""Which product a quantised layer takes on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.model.quantized.layers import BlockProduct, Product, QuantizedLinear
from kvboost.model.quantized.weight import QuantizedWeight, digest_of


def make_layers(
    weights: Sequence[QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
) -> list[QuantizedLinear]:
    """Layers that read the same rows."""
    made = []
    for weight, bias in zip(weights, biases, strict=True):
        n, k = weight.shape
        identity = weight.digest() + ("" if bias is None else digest_of(bias))
        made.append(QuantizedLinear(k, n, make_product(weight, bias, device, dtype), identity))
    return made


def make_product(
    weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> Product:
    return BlockProduct(weight.to(device), None if bias is None else bias.to(device, dtype))
