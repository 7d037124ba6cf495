"""Products of rows with experts' weights that stay in MXFP4 (``model/quantized/mxfp4.py``).

A program multiplies the other way around, weights ``[columns, depth]`` times rows ``[depth,
rows]``: tensor cores take their first matrix from registers, where the weights are made of codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvboost.model.triton.experts import (
    GROUP,
    Blocks,
    Tiles,
    block_and_columns,
    pairs_in,
    write_product,
)
from kvboost.model.triton.scores import INTERPRETED, product

DEPTH = tl.constexpr(128)
WORDS = tl.constexpr(16)
FEW_PAIRS = 8
"""The most pairs that leave processors idle unless programs are small."""
LEAST_CAPABILITY = (8, 0)
"""Of GPUs that multiply pairs of bfloat16 numbers."""


def _instructions() -> str:
    """PTX that makes eight pairs of bfloat16 numbers of two words, ``$8`` and ``$9``: a mask leaves
    the bits of two numbers, which the factor of their block completes. Triton alone would take each
    number out of its word for itself, with three times as many instructions."""
    lines = [
        ".reg .b32 low, high, pair, more, zero;",
        "mov.b32 zero, 0x80008000;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    for place in range(8):
        half = ("low", "high")[place // 4]
        if place % 4 < 3:
            lines.append(f"shl.b32 pair, {half}, {3 * (place % 4)};")
            lines.append("and.b32 pair, pair, 0x81c081c0;")
        else:
            lines.append(f"shl.b32 pair, {half}, 1;")
            lines.append("and.b32 pair, pair, 0x80008000;")
            for right, mask in ((3, 0x01800180), (7, 0x00400040)):
                lines.append(f"shr.b32 more, {half}, {right};")
                lines.append(f"and.b32 more, more, {mask:#010x};")
                lines.append("or.b32 pair, pair, more;")
        factor = 10 + 2 * (place // 2)  # each factor comes twice, once for each of the two words
        lines.append(f"fma.rn.bf16x2 ${place}, pair, ${factor}, zero;")
    return "{\n" + "\n".join(lines) + "\n}"


INSTRUCTIONS = tl.constexpr(_instructions())
REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))


@triton.jit
def _in_order(c0, c1, c2, c3, c4, c5, c6, c7, COLUMNS: tl.constexpr):
    """``[columns, 128]`` of eight matrices ``[columns, 16]``."""
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)).reshape(COLUMNS, DEPTH)


@triton.jit
def _factors(scales, PLACE: tl.constexpr):
    """For the numbers of a block as bfloat16 that are 2 ** 126 times too small, twice in a word."""
    return (((scales >> (8 * PLACE)) & 255) + 126 << 7) * 0x10001


@triton.jit
def _value(words, scales, PLACE: tl.constexpr):
    """float32 numbers, one of each word."""
    half = words >> (16 * (PLACE // 4))
    if PLACE % 4 == 3:
        sign = half >> 14 & 1
        rest = (half >> 9 & 6) | (half >> 13 & 1)
    else:
        sign = half >> (15 - 3 * (PLACE % 4)) & 1
        rest = half >> (6 - 3 * (PLACE % 4)) & 7
    doubled = tl.where(rest < 4, rest, (2 | (rest & 1)) << (tl.maximum(rest >> 1, 1) - 1))
    octet = (scales >> (8 * (PLACE // 2))) & 255
    scale = tl.where(octet > 0, octet << 23, 1 << 22).to(tl.float32, bitcast=True)
    value = doubled.to(tl.float32) * 0.5 * scale[:, None]
    return tl.where(sign > 0, -value, value)


@triton.jit
def _weights(words, scales, COLUMNS: tl.constexpr, NUMBER: tl.constexpr, PTX: tl.constexpr):
    """``[columns, 128]`` from words ``[columns, 16]`` and scales ``[columns]``."""
    if PTX:
        c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
            INSTRUCTIONS,
            REGISTERS,
            [
                words,
                _factors(scales, 0)[:, None],
                _factors(scales, 1)[:, None],
                _factors(scales, 2)[:, None],
                _factors(scales, 3)[:, None],
            ],
            (tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        c0, c1 = _value(words, scales, 0), _value(words, scales, 1)
        c2, c3 = _value(words, scales, 2), _value(words, scales, 3)
        c4, c5 = _value(words, scales, 4), _value(words, scales, 5)
        c6, c7 = _value(words, scales, 6), _value(words, scales, 7)
    return _in_order(c0, c1, c2, c3, c4, c5, c6, c7, COLUMNS).to(NUMBER)


@triton.jit(do_not_specialize=["num_blocks"])
def _packed_product_kernel(
    rows,
    words,
    scales,
    biases,
    shares,
    order,
    experts,
    num_blocks,
    out,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PTX: tl.constexpr,
):
    """As the kernel of :mod:`kvboost.model.triton.experts` for weights ``[WIDTH, K]``."""
    block, column = block_and_columns(num_blocks, WIDTH, COLUMNS, GROUP)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    pair, used = pairs_in(order, block, ROWS)
    GROUPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    depth, word = tl.arange(0, DEPTH), tl.arange(0, WORDS)
    at = expert * GROUPS * WIDTH + tl.minimum(column, WIDTH - 1)
    from_rows = rows + (pair // CHOSEN)[:, None] * K + depth[None, :]
    from_words = words + at[:, None] * WORDS + word[None, :]
    from_scales = scales + at
    found = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, K, DEPTH):
        left = depth < K - start
        x = tl.load(from_rows, mask=used[:, None] & left[None, :], other=0.0)
        w = _weights(tl.load(from_words), tl.load(from_scales), COLUMNS, x.dtype, PTX)
        found += product(w, tl.trans(x))
        from_rows += DEPTH
        from_words += WIDTH * WORDS
        from_scales += WIDTH
    write_product(tl.trans(found), biases, shares, out, expert, pair, used, column, WIDTH)


def packed_tiles(pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """Tiles for so many pairs."""
    of_expert = pairs / num_experts
    if dtype == torch.float32:
        return Tiles(16 if of_expert <= 16 else 32, 64, 128, 4, 2)
    if pairs <= FEW_PAIRS:
        return Tiles(16, 64, 128, 4, 5)
    if of_expert <= 12:
        return Tiles(16, 128, 128, 4, 4)
    if of_expert <= 40:
        return Tiles(32, 128, 128, 4, 4)
    if of_expert <= 80:
        return Tiles(64, 128, 128, 8, 3)
    return Tiles(128, 128, 128, 8, 3)


class PackedWeights(NamedTuple):
    """The weights of one product of all experts, as codes."""

    codes: torch.Tensor
    """int32 ``[experts, k / 128, n, 16]``."""
    scales: torch.Tensor
    """int32 ``[experts, k / 128, n]``."""
    depth: int
    """``k``, without the zeros at the end."""
    bias: torch.Tensor | None

    @property
    def num_experts(self) -> int:
        return len(self.codes)

    def tiles(self, pairs: int, dtype: torch.dtype) -> Tiles:
        return packed_tiles(pairs, self.num_experts, dtype)

    def product(
        self,
        rows: torch.Tensor,
        blocks: Blocks | None,
        chosen: torch.Tensor,
        tiles: Tiles,
        *,
        pairs_of_row: int,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        width = self.codes.shape[2]
        out = rows.new_empty(len(chosen), width)
        order, experts = (None, chosen) if blocks is None else blocks
        grid = (len(experts) * triton.cdiv(width, tiles.columns),)
        _packed_product_kernel[grid](
            *(rows, self.codes, self.scales, self.bias, shares),
            *(order, experts, len(experts), out),
            K=self.depth,
            WIDTH=width,
            CHOSEN=pairs_of_row,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            GROUP=GROUP,
            PTX=_takes_ptx(rows),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out


def _takes_ptx(rows: torch.Tensor) -> bool:
    if INTERPRETED.value or rows.dtype != torch.bfloat16 or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(rows.device) >= LEAST_CAPABILITY
