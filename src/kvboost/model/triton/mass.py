"""Attention mass: how much a few rows, such as a prompt's last ones, attend to each key. A first
pass finds the sums of exponentials, a second one adds up the weights key by key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost.model.triton.attention import LEAST_TURNS, attend
from kvboost.model.triton.pages import check_pages
from kvboost.model.triton.rows import TiledRows
from kvboost.model.triton.scores import (
    LOG2_E,
    factor_of,
    is_present,
    page_of,
    product,
    row_offsets,
    scores_of,
)

KEYS = 64
"""Keys of one program."""
WIDE_ROWS = {"num_warps": 8, "num_stages": 1}
"""For latents, which leave no memory for the rows after the next ones."""


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "window"],
    do_not_specialize_on_alignment=["positions", "weights", "table", "absent", "lse"],
)
def _mass_kernel(
    query, query_row_stride, query_head_stride, positions, weights, num_rows, table,
    pages, page_stride, head_stride, token_stride, absent, lse, mass, num_keys, scale, cap,
    window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    ROTATED: tl.constexpr, TURNS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile, kind = tl.program_id(0), tl.program_id(1)
    weights += kind * num_rows
    mass += kind * num_keys
    key = tile * KEYS + tl.arange(0, KEYS)
    present = is_present(key, absent, num_keys)
    if tl.max(present.to(tl.int32), 0) == 0:
        tl.store(mass + key, tl.zeros([KEYS], tl.float32), mask=key < num_keys)
        return
    page = page_of(table, key, num_keys, PAGE)
    factor = factor_of(scale, cap)
    channel, turn = tl.arange(0, WIDE), tl.arange(0, TURNS)
    total = tl.zeros([KEYS], tl.float32)
    for head in range(KV_HEADS):
        at = row_offsets(page, tile, head, page_stride, head_stride, token_stride, PAGE, KEYS)
        inside = present[None, :] & (channel[:, None] < DIM)
        key_at = pages + at[None, :]
        keys = tl.load(key_at + (ROTATED + channel[:, None]), mask=inside, other=0.0)
        if ROTATED:
            turns = present[None, :] & (turn[:, None] < ROTATED)
            turned = tl.load(key_at + turn[:, None], mask=turns, other=0.0)
        for start in range(0, num_rows * GROUP, ROWS):
            fold = start + tl.arange(0, ROWS)
            row, own_head = fold // GROUP, head * GROUP + fold % GROUP
            used = row < num_rows
            position = tl.load(positions + row, mask=used, other=-1)
            weight = tl.load(weights + row, mask=used, other=0.0)
            used = (position >= 0) & (weight != 0)  # others are padding or count nothing
            log_sum = tl.load(lse + row * (KV_HEADS * GROUP) + own_head, mask=used, other=0.0)
            query_at = row.to(tl.int64) * query_row_stride + own_head * query_head_stride
            own_query = query + query_at[:, None]
            queries = tl.load(
                own_query + (ROTATED + channel[None, :]),
                mask=used[:, None] & (channel[None, :] < DIM),
                other=0.0,
            )
            scores = product(queries, keys)
            if ROTATED:
                is_read = used[:, None] & (turn[None, :] < ROTATED)
                rotated = tl.load(own_query + turn[None, :], mask=is_read, other=0.0)
                scores += product(rotated, turned)
            scores = scores_of(scores, position, key, present, scale, cap, window, True)
            seen = tl.exp2(scores * factor - log_sum[:, None] * LOG2_E)
            total += tl.sum(seen * weight[:, None], 0)
    tl.store(mass + key, total / (KV_HEADS * GROUP), mask=key < num_keys)


def attention_mass(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: TiledRows,
    scale: float,
    num_keys: int,
    weights: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    absent: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    rotated: int | None = None,
) -> torch.Tensor:
    """The attention of the ``rows`` of one request to each of its first ``num_keys`` keys: after
    softmax, averaged over heads, summed over rows by each of several ``weights``, float32
    ``[kinds, rows]``. The result is float32 ``[kinds, num_keys]``. The options are those of
    ``attend``, and ``absent`` is ``[keys]``."""
    kv_heads, page, dim = check_pages(pages)
    num_rows, heads = len(rows.positions), query.shape[1]
    query = query if query.stride(2) == 1 else query.contiguous()
    absent = None if absent is None else absent[None]
    lse = torch.empty(num_rows, heads, dtype=torch.float32, device=query.device)
    rules = (scale, window, softcap, sinks, rotated)
    attend(query, pages, rows, *rules, absent=absent, lse=lse)
    dim = dim if rotated is None else 2 * dim - rotated
    kinds = len(weights)
    mass = torch.empty(kinds, num_keys, dtype=torch.float32, device=query.device)
    _mass_kernel[(triton.cdiv(num_keys, KEYS), kinds)](
        *(query, query.stride(0), query.stride(1), rows.positions, weights, num_rows),
        *(rows.tables, pages, *pages.stride()[:3]),
        *(None if absent is None else absent.view(torch.uint8), lse, mass, num_keys),
        *(scale, softcap, window),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        ROTATED=rotated or 0,
        TURNS=max(LEAST_TURNS, triton.next_power_of_2(rotated or 0)),
        PAGE=page,
        ROWS=64 if query.dtype != torch.float32 else 16,
        KEYS=KEYS,
        **({} if rotated is None else WIDE_ROWS),
    )
    return mass
