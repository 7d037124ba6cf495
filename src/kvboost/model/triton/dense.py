"""For attention kernels that want a request's keys in one piece: rows of pages as dense tensors,
and the results over two parts of the keys as one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost.model.triton.pages import check_pages

ROWS = 32
"""Rows of one program."""
COUNTED_ROWS = 64
"""Rows of one program that may have nothing to do. As many as one tile of keys has at most: tiles
are read whole."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["table", "counted"])
def _gather_kernel(
    pages, page_stride, head_stride, token_stride, table, num_rows, counted, keys,
    values, out_head_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stored = row < num_rows
    if counted is not None:
        num_rows = tl.load(counted)
        if tl.program_id(0) * ROWS >= num_rows:
            return
    used = row < num_rows
    page = tl.load(table + row // PAGE, mask=used, other=0).to(tl.int64)
    row = row.to(tl.int64)
    at = page * page_stride + head * head_stride + (row % PAGE) * token_stride
    channel = tl.arange(0, WIDE)[None, :]
    inside = used[:, None] & (channel < DIM)
    key = tl.load(pages + at[:, None] + channel, mask=inside, other=0.0)
    value = tl.load(pages + at[:, None] + (DIM + channel), mask=inside, other=0.0)
    to = (head * out_head_stride + row * DIM)[:, None] + channel
    inside = stored[:, None] & (channel < DIM)
    tl.store(keys + to, key, mask=inside)
    tl.store(values + to, value, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["sinks"])
def _merge_kernel(
    past, past_row_stride, past_head_stride, past_lse, past_lse_stride,
    own, own_row_stride, own_head_stride, own_lse, own_lse_stride, num_rows, sinks,
    out, out_row_stride, out_head_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < num_rows
    before = tl.load(past_lse + head * past_lse_stride + row, mask=used, other=0.0)
    after = tl.load(own_lse + head * own_lse_stride + row, mask=used, other=0.0)
    share = tl.sigmoid(before - after)[:, None]
    channel = tl.arange(0, WIDE)[None, :]
    inside = used[:, None] & (channel < DIM)
    past_at = past + (row * past_row_stride + head * past_head_stride)[:, None] + channel
    own_at = own + (row * own_row_stride + head * own_head_stride)[:, None] + channel
    first = tl.load(past_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(own_at, mask=inside, other=0.0).to(tl.float32)
    merged = second + share * (first - second)
    if sinks is not None:
        most = tl.maximum(before, after)
        whole = most + tl.log(tl.exp(before - most) + tl.exp(after - most))
        merged *= tl.sigmoid(whole - tl.load(sinks + head).to(tl.float32))[:, None]
    out_at = out + (row * out_row_stride + head * out_head_stride)[:, None] + channel
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=inside)


def gather(
    pages: torch.Tensor, table: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``num_rows`` keys and values of a request, ``[kv_heads, rows, dim]`` each, from a
    layer's ``pages``, ``[pages, kv_heads, page, 2 * dim]``. ``table`` are its pages, int32."""
    if num_rows > len(table) * pages.shape[2]:
        raise ValueError(f"{num_rows} rows need more pages than the {len(table)} of the request")
    return _gather(pages, table, num_rows, None, ROWS)


def gather_counted(
    pages: torch.Tensor, table: torch.Tensor, num_rows: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`gather`, for a number of rows that only the device knows: int32 ``[1]``, at most
    ``most``. The last ``COUNTED_ROWS`` that are begun end with zeros, and nothing is written after
    them."""
    rows = triton.cdiv(most, COUNTED_ROWS) * COUNTED_ROWS
    return _gather(pages, table, rows, num_rows, COUNTED_ROWS)


def _gather(
    pages: torch.Tensor, table: torch.Tensor, rows: int, counted: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of so many ``rows``, ``block`` by a program; of the last only zeros if there
    are fewer ``counted`` ones."""
    kv_heads, page, dim = check_pages(pages)
    size = (2, kv_heads, rows, dim)
    keys, values = torch.empty(size, dtype=pages.dtype, device=pages.device)
    _gather_kernel[(triton.cdiv(rows, block), kv_heads)](
        *(pages, *pages.stride()[:3], table, rows, counted, keys, values, keys.stride(0)),
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        PAGE=page,
        ROWS=block,
    )
    return keys, values


def merge(
    past: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes attention over two sets of keys into ``out``, ``[rows, heads, dim]``. ``past`` and
    ``own`` are the attention over each, of that shape, and its logarithms of the sums of
    exponentials, float32 ``[heads, rows]``. ``out`` may be one of them. ``sinks``, ``[heads]``, are
    one more score of each head, whose value is zero."""
    num_rows, heads, dim = out.shape
    for part, lse in (past, own):
        if part.shape != out.shape or lse.shape != (heads, num_rows) or lse.stride(1) != 1:
            raise ValueError(
                f"parts of shape {tuple(part.shape)} with sums {tuple(lse.shape)} do not make up "
                f"{tuple(out.shape)}"
            )
    _merge_kernel[(triton.cdiv(num_rows, ROWS), heads)](
        *(past[0], past[0].stride(0), past[0].stride(1), past[1], past[1].stride(0)),
        *(own[0], own[0].stride(0), own[0].stride(1), own[1], own[1].stride(0)),
        *(num_rows, sinks, out, out.stride(0), out.stride(1)),
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        ROWS=ROWS,
    )
