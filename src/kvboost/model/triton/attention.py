"""Attention of scattered rows over KV in pages.

The rows of a request need not be consecutive: each has its position, as data, and attends to all
keys up to it. A program computes a tile of rows that follow one another in the list, times the
query heads that share a KV head, so a tile of scattered rows costs as much as a tile of consecutive
ones; it may end between two heads of a row. Tiles with many keys are split over them, so that all
programs end at about the same time, and a second kernel combines the parts. Hopper has units for
copying tiles, which read whole pages. For many rows of one request, its keys and values are first
copied into one piece each: these units are faster still if they need no table. Rows that are keys
and values in one (latents) are read once for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvboost.model.triton.attending import (
    attend_cut_page,
    attend_dense_keys,
    attend_keys,
    attend_latent_pages,
    attend_latents,
    attend_pages,
)
from kvboost.model.triton.dense import gather_counted
from kvboost.model.triton.pages import check_pages
from kvboost.model.triton.rows import FEW_ROWS, ITEM_FIELDS, TILE_FIELDS, TiledRows
from kvboost.model.triton.scores import LN_2, LOWEST, count_sinks

LEAST_TURNS = 16
"""Products of matrices are of so many channels at least."""
COMBINED = 16
"""Parts, times rows and heads, that one program combines at a time, of tiles with few rows or if
there are many tiles."""
FEW_COMBINED = 1 << 14
"""Up to so many rows times heads of larger tiles, each has a program of its own, of one warp, which
combines ``SOME_PARTS`` at a time."""
SOME_PARTS = 8
ITEM, TILE = tl.constexpr(len(ITEM_FIELDS)), tl.constexpr(len(TILE_FIELDS))


@triton.jit(
    do_not_specialize=["table_stride", "absent_stride", "window"],
    do_not_specialize_on_alignment=[
        *("positions", "items", "tables", "counted", "absent", "sinks", "lse")
    ],
)
def _attend_kernel(
    query, query_row_stride, query_head_stride, positions, items, tables, table_stride, counted,
    pages, page_stride, head_stride, token_stride, absent, absent_stride, sinks,
    out, out_row_stride, out_head_stride, lse, lse_row_stride, parts, part_lse, whole, turns, keys,
    values, dense_rows, scale, cap, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROTATED: tl.constexpr,
    TURNS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes an item: a tile of rows over a part of its keys. Rows that its place has room for,
    but that are not there, get zeros. If channels are ``ROTATED``, rows of pages are latents."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM
    request, start, count, room = (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
    )  # fmt: skip
    part, num_parts, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    if room == 0:
        return

    fold = tl.arange(0, ROWS)
    row, own_head = (start + fold) // GROUP, head * GROUP + (start + fold) % GROUP
    used, owned = fold < count, fold < room
    channel = tl.arange(0, WIDE)
    inside = channel[None, :] < DIM
    out_at = out + (row.to(tl.int64) * out_row_stride + own_head * out_head_stride)[:, None]
    if count == 0:
        nothing = tl.zeros([ROWS, WIDE], out.dtype.element_ty)
        tl.store(out_at + channel[None, :], nothing, mask=owned[:, None] & inside)
        return

    query_at = row.to(tl.int64) * query_row_stride + own_head * query_head_stride
    own_query = query + query_at[:, None]
    queries = tl.load(
        own_query + (ROTATED + channel[None, :]), mask=used[:, None] & inside, other=0.0
    )
    position = tl.load(positions + row, mask=used, other=-1)

    # Positions ascend, so the first row's tells which keys all rows see.
    lowest = tl.load(positions + start // GROUP)
    end = tl.load(positions + (start + count - 1) // GROUP) + 1
    first = 0
    if window is not None:
        first = tl.maximum(0, lowest - window + 1) // KEYS
    last = tl.cdiv(end, KEYS)
    share = tl.cdiv(last - first, num_parts)
    first = tl.minimum(first + part * share, last)
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
    if whole is not None:
        present = end
        if counted is not None:
            present = tl.load(counted)
        full = tl.maximum(plain, tl.minimum(last, present // KEYS))
    if ROTATED:
        turn = tl.arange(0, TURNS)[None, :]
        rotated = tl.load(own_query + turn, mask=used[:, None] & (turn < ROTATED), other=0.0)
        if whole is None:
            acc, total, best = attend_latents(
                acc, total, best, queries, rotated, position, pages, table, absent, first, plain,
                end, page_stride, head_stride, token_stride, scale, cap, window,
                DIM=DIM, WIDE=WIDE, ROTATED=ROTATED, TURNS=TURNS, PAGE=PAGE, KEYS=KEYS,
                MASKED=False,
            )  # fmt: skip
            acc, total, best = attend_latents(
                acc, total, best, queries, rotated, position, pages, table, absent, plain, last,
                end, page_stride, head_stride, token_stride, scale, cap, window,
                DIM=DIM, WIDE=WIDE, ROTATED=ROTATED, TURNS=TURNS, PAGE=PAGE, KEYS=KEYS,
                MASKED=True,
            )  # fmt: skip
        else:
            acc, total, best = attend_latent_pages(
                acc, total, best, queries, rotated, position, whole, turns, table, first, plain,
                end, scale, cap, ROTATED=ROTATED, KEYS=KEYS, MASKED=False, CUT=False,
            )  # fmt: skip
            acc, total, best = attend_latent_pages(
                acc, total, best, queries, rotated, position, whole, turns, table, plain, full,
                end, scale, cap, ROTATED=ROTATED, KEYS=KEYS, MASKED=True, CUT=False,
            )  # fmt: skip
            if full < last:
                acc, total, best = attend_latent_pages(
                    acc, total, best, queries, rotated, position, whole, turns, table, full, last,
                    end, scale, cap, ROTATED=ROTATED, KEYS=KEYS, MASKED=True, CUT=True,
                )  # fmt: skip
    elif keys is not None:
        begin = head * dense_rows
        acc, total, best = attend_dense_keys(
            acc, total, best, queries, position, keys, values, begin, first, plain, end,
            scale, cap, KEYS=KEYS, MASKED=False,
        )  # fmt: skip
        acc, total, best = attend_dense_keys(
            acc, total, best, queries, position, keys, values, begin, plain, last, end,
            scale, cap, KEYS=KEYS, MASKED=True,
        )  # fmt: skip
    elif whole is not None:
        acc, total, best = attend_pages(
            acc, total, best, queries, position, whole, table, head, first, plain,
            scale, cap, DIM=DIM, KEYS=KEYS, MASKED=False,
        )  # fmt: skip
        acc, total, best = attend_pages(
            acc, total, best, queries, position, whole, table, head, plain, full,
            scale, cap, DIM=DIM, KEYS=KEYS, MASKED=True,
        )  # fmt: skip
        if full < last:
            acc, total, best = attend_cut_page(
                acc, total, best, queries, position, whole, table, head, full, end, scale, cap,
                DIM=DIM, KEYS=KEYS,
            )  # fmt: skip
    else:
        if window is None and absent is None:
            acc, total, best = attend_keys(
                acc, total, best, queries, position, pages, table, absent, head, first, plain,
                end, page_stride, head_stride, token_stride, scale, cap, window,
                DIM=DIM, WIDE=WIDE, PAGE=PAGE, KEYS=KEYS, MASKED=False,
            )  # fmt: skip
        acc, total, best = attend_keys(
            acc, total, best, queries, position, pages, table, absent, head, plain, last,
            end, page_stride, head_stride, token_stride, scale, cap, window,
            DIM=DIM, WIDE=WIDE, PAGE=PAGE, KEYS=KEYS, MASKED=True,
        )  # fmt: skip

    total = tl.where(total > 0, total, 1.0)  # a part without keys
    acc = tl.where(used[:, None], acc / total[:, None], 0.0)
    weight = best + tl.log2(total)
    if parts is not None and num_parts > 1:
        place = (slot.to(tl.int64) * tl.num_programs(0) + head) * ROWS + fold
        to = parts + place[:, None] * DIM + channel[None, :]
        tl.store(to, acc, mask=owned[:, None] & inside)
        tl.store(part_lse + place, weight, mask=owned)
    else:
        if sinks is not None:
            acc, weight = count_sinks(acc, weight, sinks, own_head, used)
        done = acc.to(out.dtype.element_ty)
        tl.store(out_at + channel[None, :], done, mask=owned[:, None] & inside)
        if lse is not None:
            lse_at = lse + row.to(tl.int64) * lse_row_stride + own_head
            tl.store(lse_at, weight * LN_2, mask=used)


@triton.jit(
    do_not_specialize=["tile_rows"], do_not_specialize_on_alignment=["tiles", "sinks", "lse"]
)
def _combine_kernel(
    parts, part_lse, tile_rows, tiles, sinks, out, out_row_stride, out_head_stride,
    lse, lse_row_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines the parts of ``BLOCK`` rows times heads of one tile, ``PARTS`` at a time."""
    head, tile = tl.program_id(1), tiles + tl.program_id(2) * TILE
    start, room = tl.load(tile), tl.load(tile + 1)
    slot, num_parts = tl.load(tile + 2), tl.load(tile + 3)
    if num_parts < 2:
        return
    fold = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDE)
    owned, inside = fold < room, channel < DIM
    acc = tl.zeros([BLOCK, WIDE], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], LOWEST, tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        used = (part < num_parts)[:, None] & owned[None, :]
        at = (slot + part).to(tl.int64) * tl.num_programs(1) + head
        at = at[:, None] * tile_rows + fold[None, :]
        weight = tl.load(part_lse + at, mask=used, other=LOWEST)
        part_at = parts + at[:, :, None] * DIM + channel[None, None, :]
        found = tl.load(part_at, mask=used[:, :, None] & inside[None, None, :], other=0.0)
        new_best = tl.maximum(best, tl.max(weight, 0))
        weight = tl.exp2(weight - new_best[None, :])
        fade = tl.exp2(best - new_best)
        acc = acc * fade[:, None] + tl.sum(found * weight[:, :, None], 0)
        total = total * fade + tl.sum(weight, 0)
        best = new_best
    row, own_head = (start + fold) // GROUP, head * GROUP + (start + fold) % GROUP
    row = row.to(tl.int64)
    out_at = out + (row * out_row_stride + own_head * out_head_stride)[:, None] + channel[None, :]
    acc, weight = acc / total[:, None], best + tl.log2(total)
    if sinks is not None:
        acc, weight = count_sinks(acc, weight, sinks, own_head, owned)
    done = acc.to(out.dtype.element_ty)
    tl.store(out_at, done, mask=owned[:, None] & inside[None, :])
    if lse is not None:
        lse_at = lse + row * lse_row_stride + own_head
        tl.store(lse_at, weight * LN_2, mask=owned)


def check_query(
    query: torch.Tensor, pages: torch.Tensor, rows: TiledRows, rotated: int | None = None
) -> None:
    kv_heads, _, dim = check_pages(pages)
    dim = dim if rotated is None else 2 * dim
    if rotated is not None and (kv_heads != 1 or not 0 < rotated < dim):
        raise ValueError(f"{rotated} of {dim} channels of {kv_heads} heads of latents rotate")
    found, needed = query.shape[1:], (kv_heads * rows.group, dim)
    if len(query) < len(rows.positions) or found != needed or query.dtype != pages.dtype:
        raise ValueError(
            f"queries are {query.dtype} of shape {tuple(query.shape)}; {len(rows.positions)} rows "
            f"over these pages need {pages.dtype} {(len(rows.positions), *needed)}"
        )


def whole_pages(
    pages: torch.Tensor, rows: TiledRows, rotated: int | None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """The descriptors that load the keys or the values of a page, or its latents, and what is
    rotated of these; None if ``rows`` do not read whole pages."""
    if rows.tile.reads != "pages":
        return None, None
    _, page, dim = check_pages(pages)
    widths = (dim,) if rotated is None else (2 * dim - rotated, rotated)
    if any(width & (width - 1) for width in widths):
        return None, None
    if page != rows.tile.keys:
        raise ValueError(f"pages have {page} rows; a tile of {rows.tile.keys} keys is not a page")
    flat = pages.flatten(0, 2)
    found = [TensorDescriptor.from_tensor(flat, [page, width]) for width in widths]
    return found[0], found[1] if rotated is not None else None


def _dense(
    pages: torch.Tensor, rows: TiledRows
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, int]:
    """The keys and the values in one piece each, and how many rows they have; None if ``rows``
    attend to them in their pages."""
    if rows.tile.reads != "piece" or rows.num_keys is None:
        return None, None, 0
    both = gather_counted(pages, rows.tables[0], rows.num_keys, rows.end)
    block = [rows.tile.keys, both[0].shape[2]]
    keys, values = (TensorDescriptor.from_tensor(each.flatten(0, 1), block) for each in both)
    return keys, values, both[0].shape[1]


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: TiledRows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    rotated: int | None = None,
    *,
    absent: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query``, ``[rows, heads, dim]``, over ``pages``, ``[pages, kv_heads, page, 2 *
    dim]``; returns ``out``, like ``query``. A row sees the keys up to its own position, the last
    ``window`` of them if it is given, but not those that are ``absent``, bool ``[requests, keys]``.
    Every row must see a key. ``sinks``, ``[heads]``, are one more score of each head, whose value
    is zero. There may be more queries than rows; they are not computed. ``lse``,
    float32 ``[rows, heads]``, receives the logarithms of the sums of exponentials. ``rotated``:
    rows of pages are keys and values in one, and their first channels, so many, are no part of a
    value; those of ``out`` are not written."""
    kv_heads, page, dim = check_pages(pages)
    heads = query.shape[1]
    check_query(query, pages, rows, rotated)
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if absent is not None:
        if absent.shape[1] < rows.end:
            raise ValueError(
                f"absent covers {absent.shape[1]} keys of each request; there are {rows.end}"
            )
        absent = absent.view(torch.uint8)
    dim = dim if rotated is None else 2 * dim - rotated
    wide = triton.next_power_of_2(dim)
    parts = part_lse = None
    if rows.slots:
        size = (rows.slots, kv_heads, rows.tile.rows)
        parts = torch.empty(*size, dim, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(size, dtype=torch.float32, device=query.device)
    sees_all = window is None and absent is None
    whole, turns = whole_pages(pages, rows, rotated) if sees_all else (None, None)
    dense = _dense(pages, rows) if sees_all and rotated is None else (None, None, 0)
    to = out if rotated is None else out[:, :, rotated:]
    written = (to, out.stride(0), out.stride(1), lse, heads)
    _attend_kernel[(kv_heads, len(rows.items))](
        *(query, query.stride(0), query.stride(1)),
        *(rows.positions, rows.items, rows.tables, rows.tables.stride(0)),
        None if whole is None else rows.num_keys,
        *(pages, *pages.stride()[:3]),
        *(absent, 0 if absent is None else absent.stride(0), sinks),
        *(*written, parts, part_lse, whole, turns, *dense, scale, softcap, window),
        GROUP=rows.group,
        DIM=dim,
        WIDE=wide,
        ROTATED=rotated or 0,
        TURNS=max(LEAST_TURNS, triton.next_power_of_2(rotated or 0)),
        PAGE=page,
        ROWS=rows.tile.rows,
        KEYS=rows.tile.keys,
        num_warps=rows.tile.warps,
        num_stages=rows.tile.stages,
    )
    if rows.slots:
        # Many parts of few rows are loaded all at once, few parts of very many rows one by one.
        num_parts, warps = 1, 4
        if rows.tile.rows == FEW_ROWS:
            num_parts = triton.next_power_of_2(rows.most_parts)
        elif len(rows.tiles) * rows.tile.rows * kv_heads <= FEW_COMBINED:
            num_parts, warps = SOME_PARTS, 1
        block = 1 if warps == 1 else max(1, COMBINED // num_parts)
        _combine_kernel[(triton.cdiv(rows.tile.rows, block), kv_heads, len(rows.tiles))](
            *(parts, part_lse, rows.tile.rows, rows.tiles, sinks, *written),
            GROUP=rows.group,
            DIM=dim,
            WIDE=wide,
            PARTS=num_parts,
            BLOCK=block,
            num_warps=warps,
        )
    return out
