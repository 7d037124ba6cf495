"""Rows of pages as dense tensors, and attention over two parts of the keys."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.triton.dense import gather, gather_counted, merge
from support.paged_kv import DTYPES, LAYOUTS, dense, each_dtype, make_pages, random


@pytest.mark.parametrize(("layout", "dtype"), [*zip(LAYOUTS, [*DTYPES, DTYPES[0]], strict=True)])
def test_gathering(layout: str, dtype: torch.dtype) -> None:
    pages = make_pages(9, 2, 8, 24, dtype, layout)
    table = torch.tensor([7, 0, 3, 8, 5, 1], dtype=torch.int32, device=pages.device)
    keys, values = gather(pages, table, 43)
    expected = dense(pages, table)[:, :, :43]
    assert keys.is_contiguous() and values.is_contiguous()
    assert torch.equal(torch.stack([keys, values]), expected)
    with pytest.raises(ValueError, match="49 rows need more pages than the 6"):
        gather(pages, table, 49)


def test_gathering_as_many_rows_as_the_device_says() -> None:
    pages = make_pages(9, 2, 8, 16, torch.float32, "tokens first")
    table = torch.tensor([7, 0, 3, 8, 5, 1], dtype=torch.int32, device=pages.device)
    count = torch.tensor([43], dtype=torch.int32, device=pages.device)
    keys, values = gather_counted(pages, table, count, 130)
    assert keys.shape == values.shape == (2, 192, 16)  # three tiles
    found = torch.stack([keys, values])
    assert torch.equal(found[:, :, :43], dense(pages, table)[:, :, :43])
    assert not found[:, :, 43:64].any()  # the rest of a tile is read too


@each_dtype
def test_merging(dtype: torch.dtype) -> None:
    """Two parts are what one attention over all keys is."""
    rows, heads, dim, keys = 37, 3, 24, 20
    scores, values = random(heads, rows, keys), random(heads, keys, dim)

    def part(of: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = scores[..., of]
        found = torch.einsum("hrk,hkd->rhd", some.softmax(-1), values[:, of])
        return found.to(dtype), some.logsumexp(-1)

    first, second = part(slice(0, 13)), part(slice(13, keys))
    expected, sums = part(slice(0, keys))
    sinks = torch.linspace(-1, 4, heads).to(values.device, dtype)
    with_sinks = torch.empty_like(expected)
    merge(first, second, with_sinks, sinks)
    merge(first, second, second[0])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(second[0].float(), expected.float(), atol=limit, rtol=limit)
    share = sums.exp() / (sums.exp() + sinks.float().exp()[:, None])
    expected = expected.float() * share.T[..., None]
    assert torch.allclose(with_sinks.float(), expected, atol=limit, rtol=limit)
    with pytest.raises(ValueError, match="do not make up"):
        merge(first, (second[0], second[1][:, :5]), second[0])
