"""The kernels that add adapters to a product, for rows that each have an adapter of their own or
none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

SHRINK_BLOCK = 512
"""Inputs of a program that shrinks: few, so that many programs read the weights of an adapter."""
EXPAND_BLOCK = 256
"""Outputs of a program that expands."""


@triton.jit
def _shrink_kernel(
    rows, slots, down, sums, width, rank, num_rows,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def added_by_adapter(
    sums, row, slot, first, up, width, channel, inside, rank, split_stride,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The sum that the adapter in ``slot`` adds to ``channel`` of ``row``; ``first`` of its
    ranks."""
    split = tl.arange(0, PADDED)
    element = up.dtype.element_ty
    total = tl.zeros_like(channel).to(tl.float32)
    UNROLLED: tl.constexpr = min(RANKS, 16)
    for start in range(0, RANKS, UNROLLED):
        for step in tl.static_range(UNROLLED):
            line = start + step
            parts = tl.load(
                sums + split * split_stride + row * rank + first + line,
                mask=split < SPLITS,
                other=0.0,
            )
            small = tl.sum(parts, 0).to(element).to(tl.float32)
            factor = tl.load(up + (slot * RANKS + line) * width + channel, mask=inside, other=0.0)
            total += small * factor.to(tl.float32)
    return total


@triton.jit
def _expand_kernel(
    sums, adapters, up, out, width, rank, split_stride,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(adapters + row)
    if slot >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        at = out + row * width + channel
        before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        change = added_by_adapter(
            sums, row, slot, 0, up, width, channel, inside, rank, split_stride,
            SPLITS, PADDED, RANKS,
        )  # fmt: skip
        tl.store(at, (before + change).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Addition:
    """The sum that adapters add to a product, before the kernel that reads it adds it up."""

    sums: torch.Tensor
    """The result of ``shrink``."""
    slots: torch.Tensor
    up: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """Those of the kernels that add it."""
        splits, rows, rank = self.sums.shape
        return {
            "sums": self.sums,
            "adapters": self.slots,
            "up": self.up,
            "rank": rank,
            "split_stride": rows * rank,
            "SPLITS": splits,
            "PADDED": triton.next_power_of_2(splits),
            "RANKS": self.up.shape[1],
        }


NOTHING: dict[str, Any] = {
    **dict.fromkeys(("sums", "adapters", "up", "rank", "split_stride")),
    "SPLITS": 1,
    "PADDED": 1,
    "RANKS": 1,
}
"""The arguments of a kernel if there is nothing to add."""


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
        *(rows, slots, down, sums, width, rank, len(rows)), RANKS=ranks, BLOCK=SHRINK_BLOCK
    )


def expand(addition: Addition, out: torch.Tensor) -> None:
    """Adds what adapters add to ``out``, contiguous ``[rows, out]``, of one linear layer."""
    width = out.shape[1]
    _expand_kernel[(len(out), triton.cdiv(width, EXPAND_BLOCK))](
        out=out, width=width, BLOCK=EXPAND_BLOCK, **addition.arguments()
    )
