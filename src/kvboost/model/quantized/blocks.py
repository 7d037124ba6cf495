"""The blocks in which GGUF files hold weights, and their codes as :class:`QuantizedWeight`.

A row of a tensor is a sequence of blocks. In all formats of 4 bits a run of bytes holds first the
codes of its low halves, then those of its high halves; we keep neighbours in one byte:

    Q4_0   scale, 16 bytes                                     weight = scale * (code - 8)
    Q4_1   scale, offset, 16 bytes                             weight = scale * code + offset
    Q5_0   scale, 32 high bits, 16 bytes                       weight = scale * (code - 16)
    Q5_1   scale, offset, 32 high bits, 16 bytes               weight = scale * code + offset
    Q8_0   scale, 32 codes                                     weight = scale * code
    Q4_K   two scales, 8 pairs of 6 bits, 128 bytes            weight = d * s * code - e * m
    Q5_K   the same, and 32 bytes of high bits before them     weight = d * s * code - e * m
    Q6_K   128 bytes, 64 of high bits, 16 scales, a scale      weight = d * s * (code - 32)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from kvboost.model.native.blocks import read_blocks
from kvboost.model.quantized.weight import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales and offsets of some rows."""

SLICE_BYTES = 1 << 18
"""Without a compiler, rows are converted so many bytes at a time: what is in between stays in the
processor's cache."""
LEAST_HALF = 2.0**-14
"""If the largest scale is below this, float16 would lose digits of all of them."""
FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
"""The formats without codes."""


def can_read(kind: GGMLQuantizationType) -> bool:
    """Whether weights of this format stay packed."""
    return kind in _FORMATS


def readable_formats() -> list[str]:
    return [kind.name for kind in _FORMATS]


def weight_from_blocks(
    blocks: Bytes, kind: GGMLQuantizationType, order: npt.NDArray[np.int64] | None = None
) -> QuantizedWeight:
    """The weight whose rows are these blocks, ``[n, bytes of a row]``. ``order`` says which row of
    the blocks each row of the weight is."""
    made = _wide_weight(blocks, kind, order)
    dtype = scale_dtype(made.scales, made.offsets)
    offsets = None if made.offsets is None else made.offsets.to(dtype)
    return replace(made, scales=made.scales.to(dtype), offsets=offsets)


def expanded(blocks: Bytes, kind: GGMLQuantizationType, device: torch.device) -> torch.Tensor:
    """The numbers of these blocks, ``[n, bytes of a row]``, in float32 on ``device``. They equal
    those of ``gguf.dequantize``, which expands the formats that are not read here. On an NVIDIA GPU
    the bytes are copied to it and expanded there."""
    if kind not in _FORMATS and kind not in FLOATS:
        return torch.from_numpy(dequantize(blocks, kind)).to(device)
    if kind in _FORMATS and device.type != "cuda":
        return _wide_weight(blocks, kind).dequantized().to(device)
    copied = torch.from_numpy(blocks.copy()).to(device)
    if kind in FLOATS:
        return copied.view(FLOATS[kind]).float()
    bits, group, _, _ = _FORMATS[kind]
    return QuantizedWeight(*_parts(copied, kind), bits=bits, group=group).dequantized()


def _wide_weight(
    blocks: Bytes, kind: GGMLQuantizationType, order: npt.NDArray[np.int64] | None = None
) -> QuantizedWeight:
    """The same weight as :func:`weight_from_blocks`, with scales and offsets in float32."""
    bits, group, has_offsets, _ = _FORMATS[kind]
    n, row_bytes = blocks.shape
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    k = row_bytes // block_bytes * per_block
    codes = np.empty((n, k * bits // 8), np.uint8 if bits == 4 else np.int8)
    scales = np.empty((n, k // group), np.float32)
    offsets = np.empty_like(scales) if has_offsets else None
    made = QuantizedWeight(
        codes=torch.from_numpy(codes),
        scales=torch.from_numpy(scales),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        bits=bits,
        group=group,
    )
    if not read_blocks(int(kind), blocks, block_bytes, order, codes, scales, offsets):
        _read_with_torch(blocks, kind, order, made)
    return made


def _read_with_torch(
    blocks: Bytes,
    kind: GGMLQuantizationType,
    order: npt.NDArray[np.int64] | None,
    into: QuantizedWeight,
) -> None:
    """Does what the kernel does, where there is no compiler."""
    step = max(1, SLICE_BYTES // blocks.shape[1])
    for start in range(0, len(blocks), step):
        some = slice(start, start + step)
        chosen = blocks[some].copy() if order is None else blocks[order[some]]
        codes, scales, offsets = _parts(torch.from_numpy(chosen), kind)
        into.codes[some], into.scales[some] = codes, scales
        if into.offsets is not None and offsets is not None:
            into.offsets[some] = offsets


def _parts(blocks: torch.Tensor, kind: GGMLQuantizationType) -> Parts:
    """Codes, scales and offsets of rows of blocks, ``[n, bytes of a row]``, on their device."""
    read = _FORMATS[kind][-1]
    codes, scales, offsets = read(blocks.view(len(blocks), -1, GGML_QUANT_SIZES[kind][1]))
    return codes.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1)


def scale_dtype(scales: torch.Tensor, offsets: torch.Tensor | None) -> torch.dtype:
    """float16 if it keeps eleven binary digits of scales and offsets, as files have them; else
    float32."""
    given = [scales] if offsets is None else [scales, offsets]
    largest = [float(each.abs().max()) if each.numel() else 0.0 for each in given]
    fits = all(most <= torch.finfo(torch.float16).max for most in largest)
    return torch.float16 if fits and largest[0] >= LEAST_HALF else torch.float32


def _halves(runs: torch.Tensor) -> torch.Tensor:
    """``[..., m]`` bytes whose low halves are the first m codes and whose high halves the next m,
    to ``[..., 2, m / 2]`` bytes of neighbours."""
    pairs = runs.contiguous().view(torch.int16)
    low = pairs & 0x0F | pairs >> 4 & 0xF0
    high = pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
    return torch.stack([low, high], dim=-2).to(torch.uint8)


def _floats(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at byte ``at`` of each block, ``[..., 1]``."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _shifts(blocks: torch.Tensor, step: int) -> torch.Tensor:
    """Shifts by 0, ``step``, ... below 8, as a column."""
    return torch.arange(0, 8, step, dtype=blocks.dtype, device=blocks.device)[:, None]


def _q4_0(blocks: torch.Tensor) -> Parts:
    scale = _floats(blocks, 0)
    return _halves(blocks[..., 2:]).flatten(-2), scale, -8 * scale


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _halves(blocks[..., 4:]).flatten(-2), _floats(blocks, 0), _floats(blocks, 2)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 31 of ``[..., 4]`` bytes of high bits and ``[..., 16]`` bytes of low ones."""
    bits = (high[..., None] >> _shifts(high, 1)[:, 0] & 1).flatten(-2)
    return (torch.cat([low & 15, low >> 4], dim=-1) | bits << 4).view(torch.int8)


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _five_bits(blocks[..., 2:6], blocks[..., 6:]) - 16, _floats(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return codes, _floats(blocks, 0), _floats(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:].view(torch.int8), _floats(blocks, 0), None


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets ``[..., 8]`` of Q4_K and Q5_K. Of the 12 bytes, the first 8 hold in 6 bits
    each the first four scales and the first four offsets; the others have 4 bits in the last 4
    bytes and 2 in the high bits of the first 8."""
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = torch.cat([first & 63, last & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], dim=-1)
    return _floats(blocks, 0) * factors, -_floats(blocks, 2) * minima


def _q4_k(blocks: torch.Tensor) -> Parts:
    return (_halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Parts:
    high, runs = blocks[..., 16:48], blocks[..., 48:].unflatten(-1, (4, 32))
    codes = torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3, -2)
    bits = high[..., None, :] >> _shifts(high, 1) & 1
    return ((codes | bits << 4).view(torch.int8).flatten(-2), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _eights(blocks[..., :128]).unflatten(-1, (2, 2, 4))  # of 128 columns each
    high = _eights(blocks[..., 128:192]).unflatten(-1, (2, 1, 4))
    codes = torch.cat([low & _FOUR_BITS, low >> 4 & _FOUR_BITS], dim=-2)
    codes |= (high >> _shifts(high, 2) & _TWO_BITS) << 4
    factors = blocks[..., 192:208].view(torch.int8)
    return codes.flatten(-3).view(torch.int8) - 32, _floats(blocks, 208) * factors, None


_FOUR_BITS, _TWO_BITS = 0x0F0F0F0F0F0F0F0F, 0x0303030303030303


def _eights(blocks: torch.Tensor) -> torch.Tensor:
    """Eight bytes at a time: torch shifts wide numbers faster."""
    return blocks.clone(memory_format=torch.contiguous_format).view(torch.int64)


_FORMATS: dict[GGMLQuantizationType, tuple[int, int, bool, Callable[[torch.Tensor], Parts]]] = {
    GGMLQuantizationType.Q4_0: (4, 32, True, _q4_0),
    GGMLQuantizationType.Q4_1: (4, 32, True, _q4_1),
    GGMLQuantizationType.Q4_K: (4, 32, True, _q4_k),
    GGMLQuantizationType.Q5_0: (8, 32, False, _q5_0),
    GGMLQuantizationType.Q5_1: (8, 32, True, _q5_1),
    GGMLQuantizationType.Q5_K: (8, 32, True, _q5_k),
    GGMLQuantizationType.Q6_K: (8, 16, False, _q6_k),
    GGMLQuantizationType.Q8_0: (8, 32, False, _q8_0),
}
"""Bits and columns of a group as we keep them, whether groups have offsets, and what reads blocks
``[rows, blocks, bytes]``."""
