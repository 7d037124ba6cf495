"""Parts of kernels: rows in pages, and scores of keys."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)
"""The score of a key that a row does not see. Finite, so that no difference of two is NaN."""


@triton.jit
def product(left, right):
    """The product of two matrices in float32; float32 matrices are not rounded to fewer bits."""
    if INTERPRETED:  # Triton's interpreter would multiply the bits of bfloat16 numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def row_offsets(
    table, key, present, head, page_stride, head_stride, token_stride, PAGE: tl.constexpr
):
    """Where the rows of ``key`` that are ``present`` begin in the pages of a request."""
    page = tl.load(table + key // PAGE, mask=present, other=0).to(tl.int64)
    return page * page_stride + head * head_stride + (key % PAGE) * token_stride


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
    """Scores ``[rows, keys]`` in units of ln 2 from the products of queries and keys. ``cap`` and
    ``window`` may be None."""
    if cap is not None:
        raw = cap * (2 * tl.sigmoid(2 * raw * scale / cap) - 1) * LOG2_E
    else:
        raw = raw * (scale * LOG2_E)
    if MASKED:
        seen = present[None, :] & (key[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (key[None, :] > position[:, None] - window)
        raw = tl.where(seen, raw, HIDDEN)
    return raw
