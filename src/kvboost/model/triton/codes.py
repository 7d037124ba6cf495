"""Weights of quantised codes: products of few rows with them, and the weights themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 16, 32, 128
"""Of one program: rows, columns of the weight, and what is added up at once."""
EXPANDED = 1024
"""Numbers of one program that expands."""


@triton.jit
def _weights(
    codes, scales, offsets, column, k, inside, K,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """float32: some columns, ``[n, 1]`` or a number, at the inputs ``k``."""
    column = column.to(tl.int64)
    if BITS == 4:
        both = tl.load(codes + column * (K // 2) + k // 2, mask=inside, other=0)
        code = ((both >> ((k % 2) * 4)) & 15).to(tl.float32)
    else:
        code = tl.load(codes + column * K + k, mask=inside, other=0).to(tl.float32)
    at = column * (K // GROUP) + k // GROUP
    weight = code * tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    if OFFSETS:
        weight += tl.load(offsets + at, mask=inside, other=0).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["M"])
def _multiply_kernel(
    rows, codes, scales, offsets, bias, out, M, N, K,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = (column < N)[:, None] & (k < K)[None, :]
        weight = _weights(
            codes, scales, offsets, column[:, None], k[None, :], inside, K, GROUP, OFFSETS, BITS
        )
        given = tl.load(
            rows + row[:, None] * K + k[None, :],
            mask=(row < M)[:, None] & (k < K)[None, :],
            other=0,
        )
        sums = tl.dot(given, tl.trans(weight.to(given.dtype)), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + column, mask=column < N, other=0).to(tl.float32)[None, :]
    used = (row < M)[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], sums.to(out.dtype.element_ty), mask=used)


@triton.jit
def _expand_kernel(
    codes, scales, offsets, out, K,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, BITS: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    k = tl.program_id(1) * EXPANDED + tl.arange(0, EXPANDED)
    weight = _weights(codes, scales, offsets, column, k, k < K, K, GROUP, OFFSETS, BITS)
    tl.store(out + column.to(tl.int64) * K + k, weight.to(out.dtype.element_ty), mask=k < K)


def multiply_codes(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ``[..., k]`` times a weight ``[n, k]``, whose parts are as in ``QuantizedWeight``.
    Weights are rounded to the dtype of the rows; sums are float32. It reads the weight once for
    every 16 rows."""
    n, k = len(codes), rows.shape[-1]
    flat = rows.reshape(-1, k).contiguous()
    out = flat.new_empty(len(flat), n)
    grid = (triton.cdiv(n, COLUMNS), triton.cdiv(len(flat), ROWS))
    _multiply_kernel[grid](
        *(flat, codes, scales, scales if offsets is None else offsets),
        *(flat if bias is None else bias, out, len(flat), n, k),
        GROUP=group,
        OFFSETS=offsets is not None,
        BIAS=bias is not None,
        BITS=bits,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
    )
    return out.view(*rows.shape[:-1], n)


def expand_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight ``[n, k]`` in ``dtype``."""
    n, k = len(codes), scales.shape[1] * group
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    _expand_kernel[(n, triton.cdiv(k, EXPANDED))](
        *(codes, scales, scales if offsets is None else offsets, out, k),
        GROUP=group,
        OFFSETS=offsets is not None,
        BITS=bits,
        EXPANDED=EXPANDED,
    )
    return out
