"""Parts of kernels: rows in pages, scores of keys, and channels that rotate together."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(float("-inf"))
"""The score of a key that a row does not see. Its weight is exactly zero: the compiler multiplies
and subtracts in one instruction, so a large finite score would not cancel itself out, but leave its
rounding error, which is larger than any score."""
LOWEST = tl.constexpr(-1e30)
"""The best score of a row that has seen no key. Finite, so that no difference of two is NaN."""


@triton.jit
def product(left, right):
    """The product of two matrices in float32; float32 matrices are not rounded to fewer bits."""
    if INTERPRETED:  # Triton's interpreter would multiply the bits of bfloat16 numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def page_of(table, key, end, PAGE: tl.constexpr):
    """The pages of the rows of ``key`` before ``end``."""
    return tl.load(table + key // PAGE, mask=key < end, other=0)


@triton.jit
def row_offsets(
    page, tile, head, page_stride, head_stride, token_stride, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """Where the rows of tile number ``tile``, of ``KEYS`` keys, begin in a layer."""
    key = tl.arange(0, KEYS)
    if KEYS % PAGE:  # else it is the same in all tiles
        key += tile * KEYS
    in_page = (key % PAGE) * token_stride
    return page.to(tl.int64) * page_stride + tl.cast(head, tl.int64) * head_stride + in_page


@triton.jit
def is_present(key, absent, end):
    """Which of ``key`` are before ``end`` and not absent. The others may hold anything, even NaN,
    and are not read."""
    present = key < end
    if absent is not None:
        present = present & (tl.load(absent + key, mask=present, other=1) == 0)
    return present


@triton.jit
def scores_of(raw, position, key, present, scale, cap, window, MASKED: tl.constexpr):
    """Scores ``[rows, keys]`` from the products ``raw`` of queries and keys. They must still be
    multiplied by ``factor_of``: in one instruction with what follows. ``cap`` and ``window`` may be
    None."""
    if cap is not None:
        raw = cap * (2 * tl.sigmoid(2 * raw * scale / cap) - 1)
    if MASKED:
        seen = present[None, :] & (key[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (key[None, :] > position[:, None] - window)
        raw = tl.where(seen, raw, HIDDEN)
    return raw


@triton.jit
def count_sinks(out, weight, sinks, head, used):
    """Attention ``out``, ``[rows, dim]``, and its log2-sum-exp2 after the softmax has one more
    score: that of ``head``, ``[rows]``, in ``sinks``. Its value is zero."""
    sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2_E
    best = tl.maximum(weight, sink)
    of_keys = tl.exp2(weight - best)
    total = of_keys + tl.exp2(sink - best)
    return out * (of_keys / total)[:, None], best + tl.log2(total)


@triton.jit
def factor_of(scale, cap):
    """The factor of scores, for weights that are powers of two."""
    return LOG2_E if cap is not None else scale * LOG2_E


@triton.jit
def channels_of(pair, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of each ``pair``: ``(i, i + PAIRS)``, or neighbours if ``INTERLEAVED``."""
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + PAIRS
    return first, second
