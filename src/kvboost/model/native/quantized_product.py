"""Products with quantised weights: the codes are multiplied as they are, with rows that are rounded
to 8 bits in groups of 32, or to 15 bits in two codes."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p

import torch

from kvboost.model import native
from kvboost.model.native.layers import Linear, LinearStruct
from kvboost.model.native.memory import large_pages
from kvboost.model.quantized.weight import QuantizedWeight

PANEL = 16
"""Rows of a weight come in multiples of this."""
BLOCK = 32
"""Columns of a weight come in multiples of this."""
SMALL_GROUP = 16
"""The only group that is not a multiple of 32."""
WEIGHTS_AT_ONCE = 4
"""The most weights that are rearranged at the same time when a model is loaded."""
CENTRE = 8
"""The code of 4 bits that is zero if codes are centred."""


class _Coding(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("bits", "group", "has_offsets", "is_wide")]


class _Panel(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("coding", c_void_p)]


class QuantizedProduct(Linear):
    """Rows times ``weight``, ``[n, k]``, or times several weights that read the same rows, whose
    outputs follow each other. It holds rearranged copies of the codes, so the weights themselves
    need not be kept. With ``gated``, there are two weights, gate and up, and the output is
    ``silu(rows gate') * (rows up')``. With ``fine``, each number of the rows has two codes, the
    second of what the first leaves, so that 15 bits of it are kept."""

    def __init__(
        self,
        weight: QuantizedWeight | Sequence[QuantizedWeight],
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        fine: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``dtype`` is that of the rows in calls of whole layers; there must be kernels for it.
        ``bias`` is that of all weights, one after the other."""
        weights = [weight] if isinstance(weight, QuantizedWeight) else list(weight)
        _check(weights, gated)
        self.dtype, self.fine = dtype, fine
        self._library = native.library(dtype)
        packed = [_PackedWeight(part, self._library) for part in weights]
        self._link(packed, weights[0].shape[1], bias, gated)

    def _link(
        self, packed: list[_PackedWeight], k: int, bias: torch.Tensor | None, gated: bool
    ) -> None:
        """Describes the product with these weights to the kernels."""
        self._packed = packed
        self.num_bytes = sum(part.num_bytes for part in packed)
        panels = [part.panels() for part in packed]
        if gated:
            ordered = [panel for pair in zip(*panels, strict=True) for panel in pair]
        else:
            ordered = [panel for part in panels for panel in part]
        self._panels = (_Panel * len(ordered))(*ordered)
        n = len(ordered) * PANEL
        if bias is not None and gated:
            bias = bias.reshape(2, -1, PANEL).transpose(0, 1).reshape(-1)
        self._bias = None if bias is None else bias.to(self.dtype).contiguous()
        self.width, self.depth = n // 2 if gated else n, k
        self.packed_depth = 2 * k if self.fine else k
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._linear = LinearStruct(
            *(None, bias_address, n, k, gated, False, ctypes.addressof(self._panels), self.fine)
        )
        self.address = ctypes.addressof(self._linear)

    def part(self, index: int, bias: torch.Tensor | None = None) -> QuantizedProduct:
        """The product with the weight at ``index`` alone. Both share its codes."""
        part = copy.copy(self)
        part._link([self._packed[index]], self.depth, bias, gated=False)
        return part


def can_multiply_quantized(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there is a kernel for this weight and rows of ``dtype`` on this machine."""
    return why_not(weight) is None and native.is_available(dtype, weight.codes.device)


def why_not(weight: QuantizedWeight) -> str | None:
    """The reason why our kernels cannot take this weight; None if they can."""
    (n, k), group = weight.shape, weight.group
    if weight.bits not in (4, 8):
        return f"codes have {weight.bits} bits; there are kernels for 4 and 8"
    if n % PANEL or k % BLOCK:
        return f"shape [{n}, {k}]: rows must be a multiple of {PANEL}, columns of {BLOCK}"
    if (group != SMALL_GROUP and (group <= 0 or group % BLOCK)) or k % group:
        return f"groups of {group} in {k} columns: 16 or a multiple of 32 that divides the columns"
    return None


def _check(weights: Sequence[QuantizedWeight], gated: bool) -> None:
    if gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        shapes = [weight.shape for weight in weights]
        raise ValueError(f"a gated product has two weights of the same shape, not {shapes}")
    if len({weight.shape[1] for weight in weights}) != 1:
        columns = [weight.shape[1] for weight in weights]
        raise ValueError(f"weights that read the same rows have as many columns, not {columns}")
    for weight in weights:
        if reason := why_not(weight):
            raise ValueError(f"there is no kernel for this quantised weight: {reason}")


class _PackedWeight:
    """The rearranged copy of one weight."""

    def __init__(self, weight: QuantizedWeight, library: ctypes.CDLL) -> None:
        n, k = weight.shape
        weight = _widened(weight)
        scales, offsets = _numbers(weight)
        bits, has_offsets = _bits(weight, offsets is not None), offsets is not None
        is_wide = scales.dtype == torch.float32
        self._coding = _Coding(bits, weight.group, has_offsets, is_wide)
        coding = ctypes.addressof(self._coding)
        self.num_bytes = int(library.kvboost_quantized_bytes(coding, n, k))
        self._memory, self._address = large_pages.take(self.num_bytes, library)
        self._count = n // PANEL
        codes = weight.codes.contiguous()
        library.kvboost_pack_quantized(
            *(coding, codes.data_ptr(), scales.data_ptr()),
            *(None if offsets is None else offsets.data_ptr(), n, k, self._address),
            max(1, torch.get_num_threads() // WEIGHTS_AT_ONCE),
        )

    def panels(self) -> list[_Panel]:
        each = self.num_bytes // self._count
        coding = ctypes.addressof(self._coding)
        return [_Panel(self._address + at * each, coding) for at in range(self._count)]


def _widened(weight: QuantizedWeight) -> QuantizedWeight:
    """Codes of 4 bits in groups of 16 have no kernel of their own: they become codes of 8 bits."""
    if weight.bits != 4 or weight.group != SMALL_GROUP:
        return weight
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(1).to(torch.int8)
    scales, offsets = weight.scales, weight.offsets
    if offsets is not None and torch.equal(offsets, scales * -CENTRE):
        codes, offsets = codes - CENTRE, None
    return QuantizedWeight(codes, scales, offsets, 8, weight.group)


def _bits(weight: QuantizedWeight, has_offsets: bool) -> int:
    """The number of bits that are kept of each code: 6 of those codes of 8 bits that fit."""
    if weight.bits == 4 or (has_offsets and weight.group == SMALL_GROUP):
        return weight.bits
    fits = int(weight.codes.min()) >= -32 and int(weight.codes.max()) < 32
    return 6 if fits else 8


def _numbers(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets, in float16 if that loses nothing. Offsets that kernels know without
    reading them are not kept: those of codes that are centred on zero."""
    scales, offsets = weight.scales, weight.offsets
    factor = -CENTRE if weight.bits == 4 else 0
    if offsets is None:
        numbers = [scales, torch.zeros_like(scales)] if factor else [scales]
    elif _are_equal(offsets[:1], scales[:1], factor) and _are_equal(offsets, scales, factor):
        numbers = [scales]
    else:
        numbers = [scales, offsets]
    # A sum is finite if all of its numbers are, in a type that cannot overflow.
    if not all(bool(part.sum(dtype=torch.float64).isfinite()) for part in numbers):
        raise ValueError("scales and offsets of a quantised weight must be finite")
    if all(part.dtype == torch.float16 or _fits_half(part) for part in numbers):
        numbers = [part.half() for part in numbers]
    else:
        numbers = [part.float() for part in numbers]
    scales, *rest = (part.contiguous() for part in numbers)
    return scales, rest[0] if rest else None


def _are_equal(offsets: torch.Tensor, scales: torch.Tensor, factor: int) -> bool:
    """Whether the offsets are the scales times ``factor``."""
    return torch.equal(offsets.float(), scales.float() * factor)


def _fits_half(numbers: torch.Tensor) -> bool:
    return torch.equal(numbers.half().float(), numbers.float())
