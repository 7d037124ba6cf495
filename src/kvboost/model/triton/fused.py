"""The work of a decoder layer between its products, one kernel each: norms with the sum before
them, rotation with the writing of fresh rows, and gates. They round where the model's own modules
do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost.model.triton.adapters import NOTHING, Addition, added_by_adapter
from kvboost.model.triton.pages import check_pages

GATED, ADAPTED = 1024, 256
"""Channels of one program that gates; the same if it adds what adapters change."""
MANY_ROWS, MANY_ADAPTED = 64, 128
"""From so many rows on, a program rotates ``ROWS`` of them; fewer are spread over more programs.
The second number is for rows to which adapters add something."""
ROWS = 16


@triton.jit
def _normed(x, total, width, eps, weight, element: tl.constexpr):
    """``x``, in float32, divided by its root mean square and multiplied by ``weight``."""
    x = (x * tl.rsqrt(total / width + eps)).to(element).to(tl.float32)
    return (x * weight.to(tl.float32)).to(element)


@triton.jit
def _add_norm_kernel(
    rows, added, summed, weight, out, eps, sums, adapters, up, rank, split_stride,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    element = out.dtype.element_ty
    channel = tl.arange(0, WIDE)
    inside = channel < WIDTH
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH + channel
    x = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    if sums is not None:
        slot = tl.load(adapters + row)
        if slot >= 0:
            x += added_by_adapter(
                sums, row, slot, 0, up, WIDTH, channel, inside, rank, split_stride,
                SPLITS, PADDED, RANKS,
            )  # fmt: skip
            x = x.to(element).to(tl.float32)
    if added is not None:
        x += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(element)
        tl.store(summed + at, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0)
    tl.store(out + at, _normed(x, tl.sum(x * x, 0), WIDTH, eps, scale, element), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def _rotate_write_kernel(
    qkv, qkv_stride, num_rows, cos, sin, cos_stride, pair_stride, query_norm, key_norm, eps, slots,
    pages, page_stride, head_stride, token_stride, sums, adapters, up, rank, split_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SECOND: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < num_rows
    slot = tl.load(slots + row, mask=used, other=0)[:, None]
    row = row.to(tl.int64)[:, None]
    element = qkv.dtype.element_ty
    pair = tl.arange(0, WIDE)[None, :]
    inside = used[:, None] & (pair < HALF)
    at = qkv + row * qkv_stride + head * (2 * HALF) + pair
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    if sums is not None:
        adapter = tl.load(adapters + row, mask=used[:, None], other=-1)
        inside_up = inside & (adapter >= 0)
        part = (head >= HEADS).to(tl.int64) + (head >= HEADS + KV_HEADS).to(tl.int64)
        columns = (HEADS + 2 * KV_HEADS) * 2 * HALF
        split = tl.arange(0, PADDED)[None, :]
        more_first = tl.zeros_like(first).to(tl.float32)
        more_second = tl.zeros_like(second).to(tl.float32)
        UNROLLED: tl.constexpr = min(RANKS, 16)
        for start in range(0, RANKS, UNROLLED):
            for step in tl.static_range(UNROLLED):
                line = start + step
                parts = tl.load(
                    sums + split * split_stride + row * rank + part * RANKS + line,
                    mask=(split < SPLITS) & (adapter >= 0),
                    other=0.0,
                )
                small = tl.sum(parts, 1).to(element).to(tl.float32)[:, None]
                from_up = up + (adapter * RANKS + line) * columns + head * (2 * HALF) + pair
                more_first += small * tl.load(from_up, mask=inside_up, other=0.0).to(tl.float32)
                more_second += small * tl.load(from_up + HALF, mask=inside_up, other=0.0).to(
                    tl.float32
                )
        first = (first.to(tl.float32) + more_first).to(element)
        second = (second.to(tl.float32) + more_second).to(element)
        if head >= HEADS + KV_HEADS:  # values are read after the kernel, too
            tl.store(at, first, mask=inside_up)
            tl.store(at + HALF, second, mask=inside_up)
    own = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
    to = pages + (
        (slot // PAGE) * page_stride + own.to(tl.int64) * head_stride + (slot % PAGE) * token_stride
    )
    to += pair
    if head >= HEADS + KV_HEADS:
        tl.store(to + 2 * HALF, first, mask=inside)
        tl.store(to + 3 * HALF, second, mask=inside)
    else:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if query_norm is not None:
            weights = key_norm
            if head < HEADS:
                weights = query_norm
            total = (tl.sum(x * x, 1) + tl.sum(y * y, 1))[:, None]
            x_weight = tl.load(weights + pair, mask=pair < HALF, other=0.0)
            y_weight = tl.load(weights + HALF + pair, mask=pair < HALF, other=0.0)
            x = _normed(x, total, 2 * HALF, eps, x_weight, element).to(tl.float32)
            y = _normed(y, total, 2 * HALF, eps, y_weight, element).to(tl.float32)
        x_turn = row * cos_stride + pair * pair_stride
        y_turn = x_turn + SECOND * pair_stride
        x_cos = tl.load(cos + x_turn, mask=inside, other=0.0).to(tl.float32)
        y_cos = tl.load(cos + y_turn, mask=inside, other=0.0).to(tl.float32)
        x_sin = tl.load(sin + x_turn, mask=inside, other=0.0).to(tl.float32)
        y_sin = tl.load(sin + y_turn, mask=inside, other=0.0).to(tl.float32)
        # As the model rounds: each product, then the sum.
        new_x = (x * x_cos).to(element).to(tl.float32) - (y * x_sin).to(element).to(tl.float32)
        new_y = (y * y_cos).to(element).to(tl.float32) + (x * y_sin).to(element).to(tl.float32)
        tl.store(at, new_x.to(element), mask=inside)
        tl.store(at + HALF, new_y.to(element), mask=inside)
        if head >= HEADS:
            tl.store(to, new_x.to(element), mask=inside)
            tl.store(to + HALF, new_y.to(element), mask=inside)


@triton.jit
def _gate_kernel(
    gate_up, out, sums, adapters, up, rank, split_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = gate_up + row * (2 * WIDTH) + channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    element = out.dtype.element_ty
    if sums is not None:
        slot = tl.load(adapters + row)
        if slot >= 0:
            gate += added_by_adapter(
                sums, row, slot, 0, up, 2 * WIDTH, channel, inside, rank, split_stride,
                SPLITS, PADDED, RANKS,
            )  # fmt: skip
            gate = gate.to(element).to(tl.float32)
            other += added_by_adapter(
                sums, row, slot, RANKS, up, 2 * WIDTH, WIDTH + channel, inside, rank, split_stride,
                SPLITS, PADDED, RANKS,
            )  # fmt: skip
            other = other.to(element).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(element).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (gate * other).to(element), mask=inside)


def add_norm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None = None,
    addition: Addition | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The root-mean-square norm of ``rows``, contiguous ``[rows, width]``, or of ``rows + added``;
    and what was normed. ``addition``: what adapters add to ``rows`` before."""
    out = torch.empty_like(rows)
    summed = rows if added is None else torch.empty_like(rows)
    width = rows.shape[1]
    _add_norm_kernel[(len(rows),)](
        *(rows, added, summed, weight, out, eps),
        **(addition.arguments() if addition is not None else NOTHING),
        WIDTH=width,
        WIDE=triton.next_power_of_2(width),
        num_warps=8 if width > 1024 else 4,
    )
    return out, summed


def rotate_and_write(
    qkv: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    addition: Addition | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotates queries and keys by ``cos_sin``, ``[rows, dim]`` each, channels ``(i, i + dim / 2)``
    as pairs, and writes keys and values into a layer's ``pages`` at ``slots``. ``cos_sin`` may
    have the numbers of each pair once, ``[rows, dim / 2]``, and any strides, which both share.
    ``qkv`` is contiguous ``[rows, (heads + 2 * kv_heads) * dim]``, and is rotated in place; returns
    its queries, keys and values, ``[rows, heads, dim]`` and twice ``[rows, kv_heads, dim]``.
    ``norms`` are the weights of norms of each query and key. ``addition``: what adapters add
    before."""
    kv_heads, page, dim = check_pages(pages)
    cos, sin = cos_sin
    assert cos.stride() == sin.stride()
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query_norm, key_norm = norms or (None, None)
    many = MANY_ROWS if addition is None else MANY_ADAPTED
    at_once, warps = (ROWS, 4) if len(qkv) >= many else (1, 1)
    _rotate_write_kernel[(triton.cdiv(len(qkv), at_once), heads + 2 * kv_heads)](
        *(qkv, qkv.stride(0), len(qkv), cos, sin, *cos.stride(), query_norm, key_norm, eps),
        *(slots, pages, *pages.stride()[:3]),
        **(addition.arguments() if addition is not None else NOTHING),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        SECOND=cos.shape[1] - dim // 2,
        WIDE=triton.next_power_of_2(dim // 2),
        PAGE=page,
        ROWS=at_once,
        num_warps=warps,
    )
    query, keys, values = qkv.view(len(qkv), -1, dim).split((heads, kv_heads, kv_heads), 1)
    return query, keys, values


def gate(gate_up: torch.Tensor, addition: Addition | None = None) -> torch.Tensor:
    """``silu(gate) * up`` of contiguous ``[rows, 2 * width]``. ``addition``: what adapters add to
    both before."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = GATED if addition is None else ADAPTED
    _gate_kernel[(rows, triton.cdiv(width, block))](
        *(gate_up, out),
        **(addition.arguments() if addition is not None else NOTHING),
        WIDTH=width,
        BLOCK=block,
    )
    return out
