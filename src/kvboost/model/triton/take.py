"""Copying rows out of pages: one kernel copies the rows of several chunks, in all layers, each into
a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvboost.model.triton.host import send
from kvboost.model.triton.pages import VECTOR_BYTES, PagedLayers

ROWS = 32
"""Rows of one program."""


@triton.jit(do_not_specialize_on_alignment=["items", "table"])
def _take_kernel(
    like,
    items,
    table,
    addresses,
    page_stride,
    head_stride,
    token_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    item = items + tl.program_id(0) * 4
    tokens, first = tl.load(item + 1), tl.load(item + 2)
    row = first + tl.arange(0, ROWS)
    used = row < tokens

    position = tl.load(item + 3) + row
    page = tl.load(table + position // PAGE, mask=used, other=0)
    pages = tl.multiple_of(tl.load(addresses + layer).to(like.dtype), ALIGN)
    start = pages + (page * page_stride + head.to(tl.int64) * head_stride)
    start += (position % PAGE) * token_stride

    chunk = tl.multiple_of(tl.load(item).to(like.dtype), ALIGN)
    to = chunk + (tl.program_id(1) * tokens + row) * DIM
    to_values = to + tl.num_programs(1) * tokens * DIM

    channel = tl.arange(0, WIDE)[None, :]
    inside = used[:, None] & (channel < DIM)
    key = tl.load(start[:, None] + channel, mask=inside)
    value = tl.load(start[:, None] + (DIM + channel), mask=inside)
    tl.store(to[:, None] + channel, key, mask=inside)
    tl.store(to_values[:, None] + channel, value, mask=inside)


def take(
    spans: Sequence[tuple[int, int]], table: Sequence[int], layers: PagedLayers
) -> list[torch.Tensor]:
    """The rows of each span, ``[2, layers, kv_heads, rows, dim]``. A span is ``(start, rows)``,
    counted from the first row of the pages ``table``."""
    like, heads = layers.first, len(layers) * layers.kv_heads
    most = len(table) * layers.page
    for start, num_rows in spans:
        if start < 0 or num_rows < 1 or start + num_rows > most:
            raise ValueError(
                f"rows {start} to {start + num_rows} are not among the {most} of these pages"
            )
    taken = [
        like.new_empty(2, len(layers), layers.kv_heads, num_rows, layers.dim)
        for _, num_rows in spans
    ]
    addresses = [one.data_ptr() for one in taken]
    items = [
        (address, num_rows, row, start)
        for address, (start, num_rows) in zip(addresses, spans, strict=True)
        for row in range(0, num_rows, ROWS)
    ]
    numbers = np.concatenate([np.array(items, np.int64).ravel(), np.array(table, np.int64)])
    sent = send(torch.from_numpy(numbers), like.device)
    are_aligned = layers.is_aligned and not any(one % VECTOR_BYTES for one in addresses)
    _take_kernel[(len(items), heads)](
        *(like, sent, sent[4 * len(items) :], layers.addresses, *layers.strides),
        KV_HEADS=layers.kv_heads,
        DIM=layers.dim,
        WIDE=triton.next_power_of_2(layers.dim),
        PAGE=layers.page,
        ALIGN=VECTOR_BYTES if are_aligned else like.itemsize,
        ROWS=ROWS,
    )
    return taken
