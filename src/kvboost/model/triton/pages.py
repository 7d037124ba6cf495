"""KV in pages, and where rows are in it.

A row of a page is a key and then a value. Where a row is both in one (latents), attention reads it
as such. All other kernels take its first half for a key and its second half for a value: channels
that rotate are in the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

VECTOR_BYTES = 16
"""A GPU reads at most this many bytes at once, from addresses that are multiples of it."""


def check_pages(pages: torch.Tensor) -> tuple[int, int, int]:
    """KV heads, rows of a page and head dimension of a layer's ``pages``,
    ``[pages, kv_heads, page, 2 * dim]``: a row's key, then its value. The last dimension must be
    contiguous; the others may have any strides."""
    if pages.dim() != 4 or pages.shape[3] % 2 or pages.stride(3) != 1:
        raise ValueError(
            f"pages have shape {tuple(pages.shape)} and strides {pages.stride()}; they must be "
            "[pages, kv_heads, page, 2 * dim] with a contiguous last dimension"
        )
    _, kv_heads, page, width = pages.shape
    return kv_heads, page, width // 2


def halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows that are keys and values in one, ``[..., 2 * dim]``, as keys and values ``[2, ...,
    dim]``: a view."""
    return rows.unflatten(-1, (2, -1)).movedim(-2, 0)


def are_joined(keys: torch.Tensor, values: torch.Tensor, dim: int) -> bool:
    """Whether ``keys`` and ``values`` of rows are the same, given twice, and each is both in
    one."""
    return keys.shape[-1] == 2 * dim and keys.data_ptr() == values.data_ptr()


def slots_of(positions: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """The slots, int64, of a request's ``positions``, whose pages are ``table``, ``[pages]``: slot
    ``s`` is row ``s % page`` of page ``s // page``."""
    return table[positions // page].long() * page + positions % page


def is_aligned(*addresses: int) -> bool:
    """Whether all these addresses and distances, in bytes, allow reading vectors."""
    return all(address % VECTOR_BYTES == 0 for address in addresses)


class PagedLayers:
    """The pages of all layers of a model, which have the same shape and strides. Their addresses
    are kept on the device, so that one kernel can write to all of them."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self.first = pages[0]
        self.kv_heads, self.page, self.dim = check_pages(self.first)
        expected = (self.first.shape, self.first.stride(), self.first.dtype, self.first.device)
        for number, layer in enumerate(pages):
            found = (layer.shape, layer.stride(), layer.dtype, layer.device)
            if found != expected:
                raise ValueError(
                    f"the pages of layer {number} are {found}, those of layer 0 {expected}; "
                    "all layers must be alike"
                )
        self.pages = list(pages)
        self.strides = self.first.stride()[:3]
        addresses = [layer.data_ptr() for layer in pages]
        self.addresses = torch.tensor(addresses, device=self.first.device)
        size = self.first.itemsize
        in_bytes = (stride * size for stride in (*self.strides, self.dim))
        self.is_aligned = is_aligned(*addresses, *in_bytes)

    def __len__(self) -> int:
        return len(self.pages)
