"""What adapters add to a product, for rows that each have an adapter of their own or none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHRINK_BLOCK = 512
"""Inputs of a program that shrinks: few, so that many programs read the weights of an adapter."""
EXPAND_BLOCK = 256
"""Outputs of a program that expands."""


@triton.jit
def _shrink_kernel(
    rows,
    slots,
    down,
    sums,
    width,
    rank,
    num_rows,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        line = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        split = tl.program_id(2).to(tl.int64)
        channel = split * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        x = tl.load(rows + row * width + channel, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(
            down + (slot * rank + line[:, None]) * width + channel[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        total = tl.sum(factor.to(tl.float32) * x[None, :], 1)
        tl.store(sums + (split * num_rows + row) * rank + line, total)


@triton.jit
def _expand_kernel(
    sums,
    slots,
    up,
    out,
    width,
    rank,
    num_rows,
    second,
    third,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        start = tl.program_id(1) * BLOCK
        part = (start >= second).to(tl.int64) + (start >= third).to(tl.int64)
        channel = start + tl.arange(0, BLOCK)
        inside = channel < width
        line = tl.arange(0, RANKS)
        split = tl.arange(0, PADDED)
        given = tl.load(
            sums + (split[:, None] * num_rows + row) * rank + part * RANKS + line[None, :],
            mask=split[:, None] < SPLITS,
            other=0.0,
        )
        element = out.dtype.element_ty
        small = tl.sum(given, 0).to(element).to(tl.float32)
        factor = tl.load(
            up + (slot * RANKS + line[:, None]) * width + channel[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        change = tl.sum(small[:, None] * factor.to(tl.float32), 0)
        at = out + row * width + channel
        before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (before + change).to(element), mask=inside)


def num_splits(width: int) -> int:
    """In how many parts ``shrink`` adds up products of so many inputs."""
    return triton.cdiv(width, SHRINK_BLOCK)


def shrink(
    rows: torch.Tensor, slots: torch.Tensor, down: torch.Tensor, ranks: int, sums: torch.Tensor
) -> None:
    """``rows``, ``[rows, in]``, times the first factors of each row's adapter, in parts, into
    ``sums``, float32 ``[num_splits(in), rows, parts * ranks]``. ``slots`` says where in ``down``,
    ``[slots, parts * ranks, in]``, these are; rows with a negative one have no adapter. All are
    contiguous."""
    rank, width = down.shape[1:]
    _shrink_kernel[(len(rows), rank // ranks, num_splits(width))](
        *(rows, slots, down, sums, width, rank, len(rows)),
        RANKS=ranks,
        BLOCK=SHRINK_BLOCK,
    )


def expand(
    sums: torch.Tensor,
    slots: torch.Tensor,
    up: torch.Tensor,
    bounds: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Adds ``sums``, rounded to the dtype of ``out``, times the second factors of each row's
    adapter to ``out``, ``[rows, out]``. ``up`` is ``[slots, ranks, out]``; the second and the third
    part of ``out`` begin at ``bounds``. All are contiguous."""
    ranks, width = up.shape[1:]
    block = EXPAND_BLOCK
    while any(bound % block for bound in bounds):  # a program has columns of one part only
        block //= 2
    splits = sums.shape[0]
    _expand_kernel[(len(out), triton.cdiv(width, block))](
        *(sums, slots, up, out, width, sums.shape[2], len(out), *bounds),
        SPLITS=splits,
        PADDED=triton.next_power_of_2(splits),
        RANKS=ranks,
        BLOCK=block,
    )
