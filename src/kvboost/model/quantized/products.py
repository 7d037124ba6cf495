"""Which product a quantised layer takes on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kvboost.model import native
from kvboost.model.native.quantized_product import QuantizedProduct, can_multiply_quantized
from kvboost.model.quantized.cuda import TensorCoreProduct, has_tensor_cores
from kvboost.model.quantized.layers import BlockProduct, Product, QuantizedLinear
from kvboost.model.quantized.weight import QuantizedWeight, digest_of

Biases = Sequence[torch.Tensor | None]


class NativeProduct:
    """One of the weights of a product of our own kernels."""

    kernel = "native, rows of 8 and 15 bits"

    def __init__(self, joint: QuantizedProduct, index: int, bias: torch.Tensor | None) -> None:
        self.joint = joint
        """The product with all weights that read the same rows."""
        self._product = joint.part(index, bias)
        self.num_bytes = self._product.num_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows)


def make_layers(
    weights: Sequence[QuantizedWeight],
    biases: Biases,
    device: torch.device,
    dtype: torch.dtype,
    *,
    fine: bool = False,
) -> list[QuantizedLinear]:
    """Layers that read the same rows. The two of a gated layer are the gate and what it
    multiplies. The weights need not be kept. With ``fine``, kernels that round rows keep more of
    them."""
    made = []
    for weight, bias, product in zip(
        weights, biases, _products(weights, biases, device, dtype, fine), strict=True
    ):
        identity = weight.digest() + ("" if bias is None else digest_of(bias))
        has_bias = bias is not None
        made.append(QuantizedLinear(weight.shape, product, has_bias=has_bias, digest=identity))
    return made


def _products(
    weights: Sequence[QuantizedWeight],
    biases: Biases,
    device: torch.device,
    dtype: torch.dtype,
    fine: bool,
) -> Sequence[Product]:
    rows = native_dtype(dtype, device)
    if rows is not None and all(can_multiply_quantized(weight, rows) for weight in weights):
        given = [bias for bias in biases if bias is not None]
        if len(given) in (0, len(biases)):
            joint_bias = torch.cat(given) if given else None
            gated = len(weights) == 2
            joint = QuantizedProduct(weights, joint_bias, gated=gated, fine=fine, dtype=rows)
            return [NativeProduct(joint, index, bias) for index, bias in enumerate(biases)]
    return [_product(*each, device, dtype) for each in zip(weights, biases, strict=True)]


def _product(
    weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> Product:
    placed = None if bias is None else bias.to(device, dtype)
    if has_tensor_cores(device, dtype):
        return TensorCoreProduct(weight.to(device), placed)
    return BlockProduct(weight.to(device), placed)


def native_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype of rows that our kernels take for rows of ``dtype``; None without kernels."""
    served = (each for each in (dtype, torch.float32) if native.is_available(each, device))
    return next(served, None)


def joint_product(parent: nn.Module, names: Sequence[str]) -> QuantizedProduct | None:
    """The product of our kernels that these layers of ``parent`` share; None if there is none."""
    layers = [getattr(parent, name, None) for name in names]
    products = [layer.product for layer in layers if isinstance(layer, QuantizedLinear)]
    found = {product.joint for product in products if isinstance(product, NativeProduct)}
    whole = len(found) == 1 and len(products) == len(layers)
    return found.pop() if whole else None


def describe_path(device: torch.device, dtype: torch.dtype) -> str:
    """The name of what multiplies with packed weights, for people."""
    if native_dtype(dtype, device) is not None:
        return "yes: native kernels, with rows rounded to 8 or 15 bits"
    if has_tensor_cores(device, dtype):
        return "yes: int4 tensor cores and Triton for few rows; for many, bfloat16 is made of codes"
    return (
        "slow: weights are expanded for every product; codes are multiplied by our kernels on a "
        "CPU, which want a compiler, and in bfloat16 on an NVIDIA GPU"
    )


def is_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are at least as fast as plain ones here."""
    return native_dtype(dtype, device) is not None or has_tensor_cores(device, dtype)
