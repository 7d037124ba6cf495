"""What adapters add to a product, for rows that each have an adapter of their own or none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHRINK_BLOCK = 1024
"""Inputs of one step of a program that shrinks."""
EXPAND_BLOCK = 256
"""Outputs of a program that expands."""


@triton.jit
def _shrink_kernel(
    rows,
    slots,
    down,
    out,
    width,
    rank,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        line = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        total = tl.zeros((RANKS,), tl.float32)
        base = down + (slot * rank + line[:, None]) * width
        for start in range(0, width, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            inside = channel < width
            x = tl.load(rows + row * width + channel, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(base + channel[None, :], mask=inside[None, :], other=0.0)
            total += tl.sum(factor.to(tl.float32) * x[None, :], 1)
        tl.store(out + row * rank + line, total.to(out.dtype.element_ty))


@triton.jit
def _expand_kernel(
    small,
    slots,
    up,
    out,
    width,
    rank,
    second,
    third,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        part = (channel >= second).to(tl.int64) + (channel >= third).to(tl.int64)
        line = tl.arange(0, RANKS)
        given = tl.load(
            small + row * rank + part[None, :] * RANKS + line[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        factor = tl.load(
            up + (slot * RANKS + line[:, None]) * width + channel[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        change = tl.sum(given.to(tl.float32) * factor.to(tl.float32), 0)
        at = out + row * width + channel
        before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (before + change).to(out.dtype.element_ty), mask=inside)


def shrink(
    rows: torch.Tensor, slots: torch.Tensor, down: torch.Tensor, ranks: int, out: torch.Tensor
) -> None:
    """``rows``, ``[rows, in]``, times the first factors of each row's adapter into ``out``,
    ``[rows, parts * ranks]``. ``slots`` says where in ``down``, ``[slots, parts * ranks, in]``,
    these are; rows with a negative one have no adapter. All contiguous."""
    rank, width = down.shape[1:]
    _shrink_kernel[(len(rows), rank // ranks)](
        *(rows, slots, down, out, width, rank),
        RANKS=ranks,
        BLOCK=min(SHRINK_BLOCK, triton.next_power_of_2(width)),
        num_warps=8,
    )


def expand(
    small: torch.Tensor,
    slots: torch.Tensor,
    up: torch.Tensor,
    bounds: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Adds ``small``, ``[rows, parts * ranks]``, times the second factors of each row's adapter to
    ``out``, ``[rows, out]``. ``up`` is ``[slots, ranks, out]``; the second and the third part of
    ``out`` begin at ``bounds``. All contiguous."""
    ranks, width = up.shape[1:]
    _expand_kernel[(len(out), triton.cdiv(width, EXPAND_BLOCK))](
        *(small, slots, up, out, width, small.shape[1], *bounds),
        RANKS=ranks,
        BLOCK=EXPAND_BLOCK,
    )
