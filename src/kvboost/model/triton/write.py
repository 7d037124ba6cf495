"""Writing fresh rows of one layer into pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost.model.triton.pages import are_joined, check_pages, halves

ROWS = 16
"""Rows of one program."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    keys, key_row_stride, key_head_stride, values, value_row_stride, value_head_stride, slots,
    num_rows, pages, page_stride, head_stride, token_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < num_rows
    slot = tl.load(slots + row, mask=used, other=-1)
    used = slot >= 0
    row = row.to(tl.int64)
    to = (slot // PAGE) * page_stride + head * head_stride + (slot % PAGE) * token_stride
    channel = tl.arange(0, WIDE)[None, :]
    inside = used[:, None] & (channel < DIM)
    key_at = keys + (row * key_row_stride + head * key_head_stride)[:, None] + channel
    value_at = values + (row * value_row_stride + head * value_head_stride)[:, None] + channel
    key = tl.load(key_at, mask=inside)
    value = tl.load(value_at, mask=inside)
    tl.store(pages + to[:, None] + channel, key, mask=inside)
    tl.store(pages + to[:, None] + (DIM + channel), value, mask=inside)


def write(
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes ``keys`` and ``values``, ``[rows, kv_heads, dim]``, into a layer's ``pages``,
    ``[pages, kv_heads, page, 2 * dim]``, at ``slots``, int64 ``[rows]``. A row whose slot is
    negative is not written. Rows that are both are given twice, as wide as those of pages."""
    kv_heads, page, dim = check_pages(pages)
    if are_joined(keys, values, dim):
        keys, values = halves(keys)
    expected = (len(slots), kv_heads, dim)
    for name, part in (("keys", keys), ("values", values)):
        if part.shape != expected or part.dtype != pages.dtype:
            raise ValueError(
                f"{name} are {part.dtype} of shape {tuple(part.shape)}; {len(slots)} slots in "
                f"these pages need {pages.dtype} {expected}"
            )
    keys, values = (part if part.stride(2) == 1 else part.contiguous() for part in (keys, values))
    _write_kernel[(-(-len(slots) // ROWS), kv_heads)](
        *(keys, keys.stride(0), keys.stride(1)),
        *(values, values.stride(0), values.stride(1)),
        *(slots, len(slots), pages, *pages.stride()[:3]),
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        PAGE=page,
        ROWS=ROWS,
    )
