"""Mixtures of experts: the products of rows with the weights of the experts that each row chose.

A *pair* is a row and one of its experts. Pairs of one expert lie together in blocks, so that a
program reads an expert's weights once for all rows of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from kvboost.model.triton.scores import product

FEW_PAIRS = 1024
"""The most pairs that one program puts in order; more are sorted by torch."""
AT_ONCE = 16
"""Pairs or blocks that this program compares with all others at once."""
GROUP = 8
"""Blocks whose programs run side by side, so that they read the same weights from the L2 cache."""


class Tiles(NamedTuple):
    """The tile that one program of a product computes, and how it is launched."""

    rows: int
    columns: int
    depth: int
    """Numbers of a row that it multiplies at once."""
    warps: int
    stages: int


class Blocks(NamedTuple):
    """Pairs in blocks of one expert each."""

    pairs: torch.Tensor
    """int32 ``[blocks * rows]``: a pair's number, or -1."""
    experts: torch.Tensor
    """int32 ``[blocks]``: an expert, or -1 for a block without pairs."""


def tiles_of(pairs_of_expert: float, dtype: torch.dtype) -> Tiles:
    """Tiles for experts that have so many pairs each, on average."""
    if dtype == torch.float32:
        return Tiles(16 if pairs_of_expert <= 16 else 64, 64, 32, 4, 2)
    if pairs_of_expert <= 12:
        return Tiles(16, 64, 128, 4, 4)
    if pairs_of_expert <= 40:
        return Tiles(32, 128, 64, 4, 4)
    if pairs_of_expert <= 80:
        return Tiles(64, 128, 64, 4, 4)
    return Tiles(128, 128, 64, 8, 3)


def in_blocks(chosen: torch.Tensor, num_experts: int, rows: int) -> Blocks:
    """``chosen``, ``[pairs]``: the expert of each pair. ``rows`` is the size of a block. The number
    of blocks depends on shapes alone, as a CUDA graph needs it."""
    pairs = len(chosen)
    most = min(pairs, num_experts + pairs // rows)
    if pairs > FEW_PAIRS:
        return _sorted_blocks(chosen, num_experts, rows, most)
    order = torch.empty(most * rows, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(most, dtype=torch.int32, device=chosen.device)
    wide = triton.next_power_of_2(num_experts)
    starts = torch.empty(wide, dtype=torch.int32, device=chosen.device)
    _order_kernel[(1,)](
        *(chosen, pairs, order, experts, starts, most),
        EXPERTS=wide,
        PAIRS=max(AT_ONCE, triton.next_power_of_2(pairs)),
        ROWS=rows,
        BLOCKS=triton.next_power_of_2(most),
        SLOTS=triton.next_power_of_2(most * rows),
        AT_ONCE=AT_ONCE,
        num_warps=8,
    )
    return Blocks(order, experts)


def _sorted_blocks(chosen: torch.Tensor, num_experts: int, rows: int, most: int) -> Blocks:
    """As :func:`in_blocks`, in torch."""
    by_expert, order = chosen.long().sort(stable=True)
    every = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(by_expert, every, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + rows - 1) // rows * rows
    padded_ends = padded.cumsum(0)
    shift = (padded_ends - padded) - (ends - counts)
    places = torch.arange(len(chosen), device=chosen.device) + shift[by_expert]
    pairs = torch.full((most * rows,), -1, dtype=torch.int32, device=chosen.device)
    pairs[places] = order.int()
    first = torch.arange(most, device=chosen.device) * rows
    experts = torch.searchsorted(padded_ends, first, right=True)
    return Blocks(pairs, torch.where(experts < num_experts, experts, -1).int())


@triton.jit(do_not_specialize=["num_pairs", "most"])
def _order_kernel(
    chosen,
    num_pairs,
    order,
    experts,
    starts,
    most,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    pair = tl.arange(0, PAIRS)
    own = tl.load(chosen + pair, mask=pair < num_pairs, other=EXPERTS).to(tl.int32)
    counts = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([PAIRS], tl.int32)
    for start in range(0, PAIRS, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(chosen + some, mask=some < num_pairs, other=EXPERTS).to(tl.int32)
        counts += tl.sum((theirs[:, None] == expert[None, :]).to(tl.int32), 0)
        earlier = (theirs[:, None] == own[None, :]) & (some[:, None] < pair[None, :])
        before += tl.sum(earlier.to(tl.int32), 0)
    padded = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(padded, 0)
    tl.store(starts + expert, ends - padded)
    slot = tl.arange(0, SLOTS)
    tl.store(order + slot, tl.full([SLOTS], -1, tl.int32), mask=slot < most * ROWS)
    block = tl.arange(0, BLOCKS)
    tl.store(experts + block, tl.full([BLOCKS], -1, tl.int32), mask=block < most)
    tl.debug_barrier()
    first = tl.load(starts + own, mask=pair < num_pairs, other=0)
    tl.store(order + first * ROWS + before, pair, mask=pair < num_pairs)
    begins = (before % ROWS == 0) & (pair < num_pairs)
    tl.store(experts + first + before // ROWS, own, mask=begins)


@triton.jit
def block_and_columns(num_blocks, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The block of pairs and the columns of the result that this program of a product computes."""
    program = tl.program_id(0)
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    group = program // (GROUP * across)
    in_group = tl.minimum(num_blocks - group * GROUP, GROUP)
    inside = program % (GROUP * across)
    block = group * GROUP + inside % in_group
    return block, (inside // in_group) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def pairs_in(order, block, ROWS: tl.constexpr):
    """The pairs of a block, and which of them there are. Without ``order``, pairs are blocks."""
    at = tl.arange(0, ROWS)
    if order is None:
        pair = tl.where(at == 0, block, -1).to(tl.int64)
    else:
        pair = tl.load(order + block * ROWS + at).to(tl.int64)
    return tl.maximum(pair, 0), pair >= 0


@triton.jit
def write_product(
    found, biases, shares, out, expert, pair, used, column, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes sums ``[rows, columns]`` with the expert's bias, times the shares of their pairs."""
    is_column = column < WIDTH
    if biases is not None:
        bias = tl.load(biases + expert * WIDTH + column, mask=is_column, other=0.0)
        found += bias.to(tl.float32)[None, :]
    if shares is not None:
        found *= tl.load(shares + pair, mask=used, other=0.0).to(tl.float32)[:, None]
    to = out + pair[:, None] * WIDTH + column[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=used[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _product_kernel(
    rows,
    weights,
    expert_stride,
    in_stride,
    out_stride,
    biases,
    shares,
    order,
    experts,
    num_blocks,
    out,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``CHOSEN``: pairs that one row of ``rows`` has. Without ``order``, pairs are blocks."""
    block, column = block_and_columns(num_blocks, WIDTH, COLUMNS, GROUP)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    pair, used = pairs_in(order, block, ROWS)
    depth = tl.arange(0, AT_ONCE)
    from_rows = rows + (pair // CHOSEN)[:, None] * DEPTH + depth[None, :]
    from_weights = weights + expert * expert_stride
    from_weights += depth[:, None] * in_stride + column[None, :] * out_stride
    is_column = column < WIDTH
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, AT_ONCE):
        if DEPTH % AT_ONCE == 0:
            x = tl.load(from_rows, mask=used[:, None], other=0.0)
            w = tl.load(from_weights, mask=is_column[None, :], other=0.0)
        else:
            left = depth < DEPTH - start
            x = tl.load(from_rows, mask=used[:, None] & left[None, :], other=0.0)
            w = tl.load(from_weights, mask=left[:, None] & is_column[None, :], other=0.0)
        found += product(x, w)
        from_rows += AT_ONCE
        from_weights += AT_ONCE * in_stride
    write_product(found, biases, shares, out, expert, pair, used, column, WIDTH)


@triton.jit
def _limited_gate_kernel(gate_up, out, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = gate_up + row * (2 * WIDTH) + 2 * channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    found = (up + 1) * gate * tl.sigmoid(gate * alpha)
    tl.store(out + row * WIDTH + channel, found.to(out.dtype.element_ty), mask=inside)


def limited_gate(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss's gate of contiguous ``[rows, 2 * width]``, whose gates and ups take turns."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _limited_gate_kernel[(rows, triton.cdiv(width, 1024))](
        gate_up, out, alpha, limit, WIDTH=width, BLOCK=1024
    )
    return out


class ExpertWeights(Protocol):
    """The weights of one product of all experts, in any form."""

    @property
    def num_experts(self) -> int: ...

    def tiles(self, pairs: int, dtype: torch.dtype) -> Tiles:
        """Tiles for so many pairs."""

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
        """``[pairs, out]`` of ``rows``, ``pairs_of_row`` of which belong to each, each times its
        share. ``chosen``: the expert of each pair."""


class Weights(NamedTuple):
    """The weights of one product of all experts."""

    weight: torch.Tensor
    """``[experts, out, in]``, with any strides."""
    bias: torch.Tensor | None

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    def tiles(self, pairs: int, dtype: torch.dtype) -> Tiles:
        return tiles_of(pairs / self.num_experts, dtype)

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
        _, width, depth = self.weight.shape
        expert_stride, out_stride, in_stride = self.weight.stride()
        out = rows.new_empty(len(chosen), width)
        order, experts = (None, chosen) if blocks is None else blocks
        grid = (len(experts) * triton.cdiv(width, tiles.columns),)
        _product_kernel[grid](
            *(rows, self.weight, expert_stride, in_stride, out_stride),
            *(self.bias, shares, order, experts, len(experts), out),
            DEPTH=depth,
            WIDTH=width,
            CHOSEN=pairs_of_row,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            AT_ONCE=min(tiles.depth, max(16, triton.next_power_of_2(depth))),
            GROUP=GROUP,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out


def mix(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum of the experts that each of ``rows``, ``[rows, width]``, has ``chosen``, ``[rows,
    k]``, weighted by ``shares``."""
    num_rows, k = chosen.shape
    pairs = chosen.reshape(-1).contiguous()
    tiles = up.tiles(len(pairs), rows.dtype)
    blocks = None if num_rows == 1 else in_blocks(pairs, up.num_experts, tiles.rows)
    gated = gate(up.product(rows.contiguous(), blocks, pairs, tiles, pairs_of_row=k))
    weighted = down.product(
        gated, blocks, pairs, tiles, pairs_of_row=1, shares=shares.reshape(-1).contiguous()
    )
    return weighted.view(num_rows, k, -1).sum(dim=1)
