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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvboost.model.native.blocks import read_blocks
from kvboost.model.quantized.weight import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Parts = tuple[npt.NDArray[Any], Floats, Floats | None]
"""Codes, scales and offsets of some rows."""

SLICE_BYTES = 1 << 18
"""Rows are converted so many bytes at a time: what is in between stays in the processor's cache."""
LEAST_HALF = 2.0**-14
"""If the largest scale is below this, float16 would lose digits of all of them."""


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
    bits, group, has_offsets, _ = _FORMATS[kind]
    n, row_bytes = blocks.shape
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    k = row_bytes // block_bytes * per_block
    codes = np.empty((n, k * bits // 8), np.uint8 if bits == 4 else np.int8)
    scales = np.empty((n, k // group), np.float32)
    offsets = np.empty_like(scales) if has_offsets else None
    if not read_blocks(int(kind), blocks, block_bytes, order, codes, scales, offsets):
        _read_with_numpy(blocks, kind, order, codes, scales, offsets)
    dtype = scale_dtype(scales, offsets)
    return QuantizedWeight(
        codes=torch.from_numpy(codes),
        scales=torch.from_numpy(scales).to(dtype),
        offsets=None if offsets is None else torch.from_numpy(offsets).to(dtype),
        bits=bits,
        group=group,
    )


def _read_with_numpy(
    blocks: Bytes,
    kind: GGMLQuantizationType,
    order: npt.NDArray[np.int64] | None,
    codes: npt.NDArray[Any],
    scales: Floats,
    offsets: Floats | None,
) -> None:
    """What the kernel does, where there is no compiler."""
    read = _FORMATS[kind][-1]
    step = max(1, SLICE_BYTES // blocks.shape[1])
    for start in range(0, len(codes), step):
        some = slice(start, min(start + step, len(codes)))
        chosen = blocks[some] if order is None else blocks[order[some]]
        rows = len(chosen)
        made, scale, offset = read(chosen.reshape(rows, -1, GGML_QUANT_SIZES[kind][1]))
        codes[some], scales[some] = made.reshape(rows, -1), scale.reshape(rows, -1)
        if offsets is not None and offset is not None:
            offsets[some] = offset.reshape(rows, -1)


def scale_dtype(scales: npt.NDArray[Any], offsets: npt.NDArray[Any] | None) -> torch.dtype:
    """float16 if it keeps eleven binary digits of scales and offsets, as files have them; else
    float32."""
    given = [scales] if offsets is None else [scales, offsets]
    largest = [float(np.abs(each).max(initial=0.0)) for each in given]
    fits = all(most <= float(np.finfo(np.float16).max) for most in largest)
    return torch.float16 if fits and largest[0] >= LEAST_HALF else torch.float32


def halves(runs: Bytes) -> Bytes:
    """``[..., m]`` bytes whose low halves are the first m codes and whose high halves the next m,
    to ``[..., 2, m / 2]`` bytes of neighbours."""
    pairs = np.ascontiguousarray(runs).view("<u2")
    made = np.empty((*pairs.shape[:-1], 2, pairs.shape[-1]), np.uint8)
    made[..., 0, :] = (pairs & 0x000F) | ((pairs & 0x0F00) >> 4)
    made[..., 1, :] = ((pairs & 0x00F0) >> 4) | ((pairs & 0xF000) >> 8)
    return made


def _floats(blocks: Bytes, at: int) -> Floats:
    """The float16 number at byte ``at`` of each block, ``[..., 1]``."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _q4_0(blocks: Bytes) -> Parts:
    scale = _floats(blocks, 0)
    return halves(blocks[..., 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Parts:
    return halves(blocks[..., 4:]), _floats(blocks, 0), _floats(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> npt.NDArray[np.int8]:
    """Codes 0 to 31 of ``[..., 4]`` bytes of high bits and ``[..., 16]`` bytes of low ones."""
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    codes = np.concatenate([low & 15, low >> 4], axis=-1)
    return (codes | bits << 4).view(np.int8)


def _q5_0(blocks: Bytes) -> Parts:
    return _five_bits(blocks[..., 2:6], blocks[..., 6:]) - 16, _floats(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return codes, _floats(blocks, 0), _floats(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[..., 2:].view(np.int8), _floats(blocks, 0), None


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets ``[..., 8]`` of Q4_K and Q5_K. Of the 12 bytes, the first 8 hold in 6 bits
    each the first four scales and the first four offsets; the others have 4 bits in the last 4
    bytes and 2 in the high bits of the first 8."""
    packed = blocks[..., 4:16]
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=-1)
    return _floats(blocks, 0) * factors, -_floats(blocks, 2) * minima


def _q4_k(blocks: Bytes) -> Parts:
    runs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return (halves(runs), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Parts:
    places = blocks.shape[:-1]
    high, runs = blocks[..., 16:48], blocks[..., 48:].reshape(*places, 4, 32)
    codes = np.stack([runs & 15, runs >> 4], axis=-2).reshape(*places, 8, 32)
    bits = high[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return ((codes | bits << 4).view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Parts:
    places = blocks.shape[:-1]
    low = _eights(blocks[..., :128]).reshape(*places, 2, 2, 4)  # of 128 columns each
    high = _eights(blocks[..., 128:192]).reshape(*places, 2, 4)
    codes = np.empty((*places, 2, 4, 4), np.uint64)
    codes[..., :2, :] = low & _FOUR_BITS
    codes[..., 2:, :] = low >> np.uint64(4) & _FOUR_BITS
    for part in range(4):
        codes[..., part, :] |= (high >> np.uint64(2 * part) & _TWO_BITS) << np.uint64(4)
    signed = codes.view(np.int8)
    signed -= 32
    factors = blocks[..., 192:208].view(np.int8)
    return signed, _floats(blocks, 208) * factors, None


_FOUR_BITS, _TWO_BITS = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0303030303030303)


def _eights(blocks: Bytes) -> npt.NDArray[np.uint64]:
    """Eight bytes at a time: numpy shifts wide numbers faster."""
    return np.ascontiguousarray(blocks).view(np.uint64)


_FORMATS: dict[GGMLQuantizationType, tuple[int, int, bool, Callable[[Bytes], Parts]]] = {
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
