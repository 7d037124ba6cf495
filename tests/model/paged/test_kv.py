"""KV in pages does what KV in a buffer does."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import PAGE, Slab
from support.tiny import DEVICE

SHAPE = KVShape(3, 2, 8, torch.float32, torch.device(DEVICE))
ROWS = 3 * PAGE - 5


@pytest.fixture
def both() -> tuple[PagedKV, RequestKV]:
    """The same random rows in scattered pages and in a buffer."""
    torch.manual_seed(0)
    slab = Slab(SHAPE, num_pages=12, num_requests=4)
    others = [slab.take(1), slab.take(1)]
    for other in others:
        assert other is not None
        slab.release(other)
    neighbour = slab.take(PAGE)
    holding = slab.take(PAGE)
    assert neighbour is not None and holding is not None and slab.take(PAGE) is not None
    assert slab.extend(holding, ROWS)
    assert holding.pages != sorted(holding.pages) or max(holding.pages) - min(holding.pages) > 2
    paged, buffer = PagedKV(slab, holding), RequestKV(SHAPE, ROWS)
    rows = torch.randn(2, 3, 2, ROWS, 8).to(DEVICE)
    for kv in (paged, buffer):
        with kv.filling(0, ROWS) as place:
            place.copy_(rows)
    assert torch.equal(paged.rows(0, ROWS), rows)
    return paged, buffer


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, ROWS), (PAGE, 2 * PAGE), (31, 33), (5, 5)])
def test_reading(both, start: int, end: int) -> None:
    paged, buffer = both
    assert torch.equal(paged.rows(start, end), buffer.rows(start, end))
    for given, expected in zip(
        paged.layer(1, start, end), buffer.layer(1, start, end), strict=True
    ):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("positions", [range(30, 40), torch.tensor([0, 31, 32, 70])])
def test_writing_one_layer(both, positions: range | torch.Tensor) -> None:
    if isinstance(positions, torch.Tensor):
        positions = positions.to(DEVICE)
    keys, values = torch.randn(2, 1, 2, len(positions), 8).to(DEVICE)
    for kv in both:
        kv.write(2, positions, keys, values)
    paged, buffer = both
    assert torch.equal(paged.rows(0, ROWS), buffer.rows(0, ROWS))


def test_changing_rows_of_one_layer(both) -> None:
    for kv in both:
        with kv.changing(1, 10, 50) as (keys, values):
            keys.add_(1)
            values.mul_(2)
    paged, buffer = both
    assert torch.equal(paged.rows(0, ROWS), buffer.rows(0, ROWS))


def test_growing_keeps_the_rows(both) -> None:
    for kv in both:
        kv.reserve(5 * PAGE)
        assert kv.capacity >= 5 * PAGE
    paged, buffer = both
    assert torch.equal(paged.rows(0, ROWS), buffer.rows(0, ROWS))
