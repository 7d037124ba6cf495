"""A layer's KV in pages, and the rows of requests in it."""

from __future__ import annotations

import torch


def check_pages(pages: torch.Tensor) -> tuple[int, int, int, int]:
    """Pages, kv heads, rows of a page and head dimension of ``pages``,
    ``[pages, kv_heads, page, 2 * dim]``: a row's key, then its value. The last dimension must be
    contiguous; the others may have any strides."""
    if pages.dim() != 4 or pages.shape[3] % 2 or pages.stride(3) != 1:
        raise ValueError(
            f"pages have shape {tuple(pages.shape)} and strides {pages.stride()}; they must be "
            "[pages, kv_heads, page, 2 * dim] with a contiguous last dimension"
        )
    count, kv_heads, page, width = pages.shape
    return count, kv_heads, page, width // 2


def slots_of(positions: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """The slots, int64, of a request's ``positions``, whose pages are ``table``, ``[pages]``: slot
    ``s`` is row ``s % page`` of page ``s // page``."""
    return table[positions // page].long() * page + positions % page
