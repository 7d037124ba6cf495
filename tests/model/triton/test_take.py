"""Rows copied out of pages, against rows read with torch."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.take import take
from support.paged_kv import dense, make_pages

LAYERS, KV_HEADS, PAGE = 2, 2, 16


def make_layers(dim: int, dtype: torch.dtype, layout: str) -> PagedLayers:
    return PagedLayers([make_pages(12, KV_HEADS, PAGE, dim, dtype, layout) for _ in range(LAYERS)])


@pytest.mark.parametrize(
    ("layout", "dim", "dtype"),
    [
        ("heads first", 24, torch.float32),
        ("tokens first", 32, torch.bfloat16),
        ("pages inside", 24, torch.bfloat16),
    ],
)
def test_each_span_has_the_rows_of_its_pages(layout: str, dim: int, dtype: torch.dtype) -> None:
    layers = make_layers(dim, dtype, layout)
    before = [pages.clone() for pages in layers.pages]
    table = [7, 2, 11, 0, 5]
    spans = [(0, 16), (16, 41), (57, 1), (3, 77)]
    taken = take(spans, table, layers)
    order = torch.tensor(table, device=layers.first.device)
    everything = torch.stack([dense(pages, order) for pages in layers.pages], 1)
    for (start, num_rows), rows in zip(spans, taken, strict=True):
        assert rows.is_contiguous()
        assert torch.equal(rows, everything[:, :, :, start : start + num_rows])
    assert all(map(torch.equal, layers.pages, before))


@pytest.mark.parametrize("span", [(0, 33), (-1, 4), (32, 1), (3, 0)])
def test_rows_that_the_pages_do_not_have_are_refused(span: tuple[int, int]) -> None:
    layers = make_layers(32, torch.float32, "heads first")
    with pytest.raises(ValueError, match="not among the 32 of these pages"):
        take([(0, 4), span], [3, 1], layers)
