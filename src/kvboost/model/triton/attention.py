"""Attention of scattered rows over KV in pages.

The rows of a request need not be consecutive: each has its position, as data, and attends to all
keys up to it. A program computes a tile of rows that follow one another in the list, times the
query heads that share a KV head, so a tile of scattered rows costs as much as a tile of consecutive
ones. If there are few tiles, each is split over its keys, and a second kernel combines the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost.model.triton.pages import check_pages
from kvboost.model.triton.rows import PagedRows
from kvboost.model.triton.scores import (
    LN_2,
    LOG2_E,
    LOWEST,
    factor_of,
    is_present,
    page_of,
    product,
    row_offsets,
    scores_of,
)


@triton.jit
def _attend_keys(
    acc,
    total,
    best,
    query,
    position,
    pages,
    table,
    absent,
    head,
    first,
    last,
    end,
    page_stride,
    head_stride,
    token_stride,
    scale,
    cap,
    window,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends to the tiles of keys ``[first, last)``. Every row sees them all unless ``MASKED``."""
    channel = tl.arange(0, WIDE)
    inside = channel < DIM
    factor = factor_of(scale, cap)
    # The pages of the next tile are read while this one is computed, so that loads of keys and
    # values wait for no other load.
    page = page_of(table, first * KEYS + tl.arange(0, KEYS), end, PAGE)
    for number in range(first, last):
        key = number * KEYS + tl.arange(0, KEYS)
        present = is_present(key, absent, end) if MASKED else key >= 0
        at = row_offsets(page, number, head, page_stride, head_stride, token_stride, PAGE, KEYS)
        page = page_of(table, key + KEYS, end, PAGE)
        key_at = pages + at[None, :] + channel[:, None]
        value_at = pages + at[:, None] + (DIM + channel[None, :])
        if MASKED or WIDE != DIM:
            keys = tl.load(key_at, mask=present[None, :] & inside[:, None], other=0.0)
        else:
            keys = tl.load(key_at)
        scores = product(query, keys)
        scores = scores_of(scores, position, key, present, scale, cap, window, MASKED)
        new_best = tl.maximum(best, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_best[:, None])
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(weights, 1)
        if MASKED or WIDE != DIM:
            values = tl.load(value_at, mask=present[:, None] & inside[None, :], other=0.0)
        else:
            values = tl.load(value_at)
        acc = acc * fade[:, None] + product(weights.to(values.dtype), values)
        best = new_best
    return acc, total, best


@triton.jit(
    do_not_specialize=["table_stride", "absent_stride", "window", "part_stride"],
    do_not_specialize_on_alignment=["positions", "tiles", "tables", "absent", "lse"],
)
def _attend_kernel(
    query,
    query_row_stride,
    query_head_stride,
    positions,
    tiles,
    tables,
    table_stride,
    pages,
    page_stride,
    head_stride,
    token_stride,
    absent,
    absent_stride,
    out,
    out_row_stride,
    out_head_stride,
    lse,
    lse_row_stride,
    part_stride,
    scale,
    cap,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tiles + tl.program_id(2) * 3
    request, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0:
        return

    fold = tl.arange(0, ROWS)
    row, own_head = start + fold // GROUP, head * GROUP + fold % GROUP
    used = fold // GROUP < count
    channel = tl.arange(0, WIDE)
    inside = used[:, None] & (channel[None, :] < DIM)
    query_at = row.to(tl.int64) * query_row_stride + own_head * query_head_stride
    queries = tl.load(query + query_at[:, None] + channel[None, :], mask=inside, other=0.0)
    position = tl.load(positions + row, mask=used, other=-1)

    # Positions ascend, so the first row's tells which keys all rows see.
    lowest = tl.load(positions + start)
    end = tl.load(positions + start + count - 1) + 1
    first = 0
    if window is not None:
        first = tl.maximum(0, lowest - window + 1) // KEYS
    last = tl.cdiv(end, KEYS)
    share = tl.cdiv(last - first, tl.num_programs(1))
    first = tl.minimum(first + split * share, last)
    last = tl.minimum(first + share, last)
    plain = first
    if window is None and absent is None:
        plain = tl.maximum(first, tl.minimum(last, (lowest + 1) // KEYS))

    table = tables + request.to(tl.int64) * table_stride
    if absent is not None:
        absent = absent + request.to(tl.int64) * absent_stride
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)
    if window is None and absent is None:
        acc, total, best = _attend_keys(
            acc, total, best, queries, position, pages, table, absent, head, first, plain, end,
            page_stride, head_stride, token_stride, scale, cap, window,
            DIM=DIM, WIDE=WIDE, PAGE=PAGE, KEYS=KEYS, MASKED=False,
        )  # fmt: skip
    acc, total, best = _attend_keys(
        acc, total, best, queries, position, pages, table, absent, head, plain, last, end,
        page_stride, head_stride, token_stride, scale, cap, window,
        DIM=DIM, WIDE=WIDE, PAGE=PAGE, KEYS=KEYS, MASKED=True,
    )  # fmt: skip

    total = tl.where(total > 0, total, 1.0)  # a part without keys
    acc = acc / total[:, None]
    out_at = row.to(tl.int64) * out_row_stride + own_head * out_head_stride
    if SPLIT:
        out = out + split.to(tl.int64) * part_stride * DIM
        lse = lse + split.to(tl.int64) * part_stride
    tl.store(out + out_at[:, None] + channel[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        weight = (best + tl.log2(total)) * LN_2
        tl.store(lse + row.to(tl.int64) * lse_row_stride + own_head, weight, mask=used)


@triton.jit(do_not_specialize=["splits", "part_stride"])
def _combine_kernel(
    parts,
    part_lse,
    part_stride,
    splits,
    out,
    out_row_stride,
    out_head_stride,
    lse,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combines the parts of one row and head, all at once."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, channel = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    used = split < splits
    at = row * HEADS + head + split.to(tl.int64) * part_stride
    weight = tl.load(part_lse + at, mask=used, other=LOWEST) * LOG2_E
    best = tl.max(weight, 0)
    weight = tl.exp2(weight - best)
    total = tl.sum(weight, 0)
    inside = used[:, None] & (channel[None, :] < DIM)
    part = tl.load(parts + at[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
    done = tl.sum(part * weight[:, None], 0) / total
    out_at = out + row * out_row_stride + head * out_head_stride + channel
    tl.store(out_at, done.to(out.dtype.element_ty), mask=channel < DIM)
    if lse is not None:
        tl.store(lse + row * HEADS + head, (best + tl.log2(total)) * LN_2)


def _check_query(query: torch.Tensor, pages: torch.Tensor, rows: PagedRows) -> None:
    kv_heads, _, dim = check_pages(pages)
    found, needed = query.shape[1:], (kv_heads * rows.group, dim)
    if len(query) < len(rows.positions) or found != needed or query.dtype != pages.dtype:
        raise ValueError(
            f"queries are {query.dtype} of shape {tuple(query.shape)}; {len(rows.positions)} rows "
            f"over these pages need {pages.dtype} {(len(rows.positions), *needed)}"
        )


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: PagedRows,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    absent: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query``, ``[rows, heads, dim]``, over ``pages``, ``[pages, kv_heads, page, 2 *
    dim]``; returns ``out``, like ``query``. A row sees the keys up to its own position, the last
    ``window`` of them if it is given, but not those that are ``absent``, bool ``[requests, keys]``.
    Every row must see a key. There may be more queries than rows; they are not computed. ``lse``,
    float32 ``[rows, heads]``, receives the logarithms of the sums of exponentials."""
    kv_heads, page, dim = check_pages(pages)
    num_rows, heads = len(rows.positions), query.shape[1]
    _check_query(query, pages, rows)
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if absent is not None:
        if absent.shape[1] < rows.end:
            raise ValueError(
                f"absent covers {absent.shape[1]} keys of each request; there are {rows.end}"
            )
        absent = absent.view(torch.uint8)
    wide = triton.next_power_of_2(dim)
    written, written_lse, part_stride = out, lse, num_rows * heads
    if rows.splits > 1:
        size = (rows.splits, num_rows, heads)
        written = torch.empty(*size, dim, dtype=torch.float32, device=query.device)
        written_lse = torch.empty(size, dtype=torch.float32, device=query.device)
    _attend_kernel[(kv_heads, rows.splits, len(rows.tiles))](
        *(query, query.stride(0), query.stride(1)),
        *(rows.positions, rows.tiles, rows.tables, rows.tables.stride(0)),
        *(pages, *pages.stride()[:3]),
        *(absent, 0 if absent is None else absent.stride(0)),
        *(written, written.stride(-3), written.stride(-2)),
        *(written_lse, heads, part_stride, scale, soft_cap, window),
        GROUP=heads // kv_heads,
        DIM=dim,
        WIDE=wide,
        PAGE=page,
        ROWS=rows.tile.rows,
        KEYS=rows.tile.keys,
        SPLIT=rows.splits > 1,
        num_warps=rows.tile.warps,
        num_stages=rows.tile.stages,
    )
    if rows.splits > 1:
        _combine_kernel[(num_rows, heads)](
            *(written, written_lse, part_stride, rows.splits),
            *(out, out.stride(0), out.stride(1), lse),
            HEADS=heads,
            DIM=dim,
            WIDE=wide,
            SPLITS=triton.next_power_of_2(rows.splits),
        )
    return out
