"""Quantised weights on NVIDIA GPUs: few rows are multiplied with the codes, of 4 bits by torch's
int4 product on tensor cores, of 8 bits by a kernel in Triton; many rows are multiplied with the
weight in bfloat16, which is expanded for the call."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvboost.model import triton
from kvboost.model.loading.device import has_capability
from kvboost.model.quantized.layers import BlockProduct, Product
from kvboost.model.quantized.weight import QuantizedWeight

FEW_ROWS = 48
"""The most rows that are multiplied with the codes. It has not been measured yet."""
GROUPS = (32, 64, 128, 256)
TILES = (8, 4, 2)
"""Columns come in multiples of 16 times one of these."""


def has_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is an int4 product for rows of ``dtype`` on ``device``."""
    return dtype == torch.bfloat16 and has_capability(device)


class TensorCoreProduct:
    """Rows in bfloat16 times a weight on an NVIDIA GPU."""

    kernel = f"torch int4, {'triton, ' if triton.is_available() else ''}bfloat16"

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight: QuantizedWeight | None = weight
        self._bias, self._group = bias, weight.group
        self._packed: torch.Tensor | None = None
        self.num_bytes = weight.nbytes
        tiles = packed_tiles(weight)
        if tiles is not None:
            self._scales = scales_and_zeros(weight)
            swapped = (weight.codes << 4) | (weight.codes >> 4)  # it has even columns high
            self._packed = torch._convert_weight_to_int4pack(swapped, tiles)
            self.num_bytes += self._packed.nbytes + self._scales.nbytes

    def with_less_memory(self) -> Product:
        """The product for a device that has none to spare: many rows are multiplied as few are,
        without codes in another form. Without Triton, weights that have no int4 product are
        expanded block by block."""
        if self._packed is None:
            assert self._weight is not None
            if triton.is_available():
                return CodesProduct(self._weight, self._bias)
            return BlockProduct(self._weight, self._bias)
        self._weight = None
        self.num_bytes = self._packed.nbytes + self._scales.nbytes
        self.kernel = f"{self.kernel}, any number of rows"
        return self

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        is_few = rows.numel() <= FEW_ROWS * rows.shape[-1]
        if self._packed is not None and (is_few or self._weight is None):
            return int4_product(rows, self._packed, self._group, self._scales, self._bias)
        assert self._weight is not None
        if is_few and triton.is_available():
            return codes_product(rows, self._weight, self._bias)
        return linear(rows, expanded(self._weight, rows.dtype), self._bias)


class CodesProduct:
    """Rows times the codes of a weight, any number of rows: it needs no other memory."""

    kernel = "triton, bfloat16, any number of rows"

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = weight.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return codes_product(rows, self._weight, self._bias)


def codes_product(
    rows: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Rows times the codes of a weight on the same GPU, by a kernel in Triton."""
    from kvboost.model.triton.codes import multiply_codes

    parts = (weight.codes, weight.scales, weight.offsets, weight.bits, weight.group)
    return multiply_codes(rows, *parts, bias)


def expanded(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in ``dtype``, in one launch if there is Triton."""
    if not triton.is_available():
        return weight.dequantized().to(dtype)
    from kvboost.model.triton.codes import expand_codes

    parts = (weight.codes, weight.scales, weight.offsets, weight.bits, weight.group)
    return expand_codes(*parts, dtype)


def int4_product(
    rows: torch.Tensor,
    packed: torch.Tensor,
    group: int,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Rows ``[..., k]`` times codes as ``_convert_weight_to_int4pack`` makes them."""
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    out = torch._weight_int4pack_mm(flat, packed, group, scales)
    out = out.view(*rows.shape[:-1], out.shape[-1])
    return out if bias is None else out + bias


def packed_tiles(weight: QuantizedWeight) -> int | None:
    """The number of tiles of 16 columns that the int4 product takes at once; None if it cannot take
    this weight."""
    n, k = weight.shape
    if weight.bits != 4 or weight.group not in GROUPS or n % 8:
        return None
    return next((tiles for tiles in TILES if k % (16 * tiles) == 0), None)


def scales_and_zeros(weight: QuantizedWeight) -> torch.Tensor:
    """bfloat16 ``[k / group, n, 2]``. The product computes ``(code - 8) * scale + zero``."""
    scales = weight.scales.float()
    zeros = 8 * scales
    if weight.offsets is not None:
        zeros = zeros + weight.offsets.float()
    return torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous().bfloat16()
