"""Attention mass over pages, against weights written out."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.triton.mass import attention_mass
from support.paged_kv import (
    attention_weights,
    dense,
    keys_values,
    make_pages,
    make_tables,
    random,
    scattered,
    tiled,
)
from support.tiny import DEVICE

SCALE = 0.2


@pytest.mark.parametrize(
    ("start", "rows", "heads", "dtype", "options"),
    [
        (131, 16, 6, torch.float32, {"sinks": torch.linspace(-1, 4, 6).to(DEVICE)}),
        (131, 16, 6, torch.bfloat16, {}),
        (5, 1, 2, torch.float32, {}),
        (64, 40, 4, torch.float32, {"window": 50, "softcap": 3.0}),
    ],
)
def test_the_mass_is_the_sum_of_weights(
    start: int, rows: int, heads: int, dtype: torch.dtype, options: dict[str, object]
) -> None:
    torch.manual_seed(start)
    pages = make_pages(14, 2, 16, 40, dtype, "tokens first")
    tables = make_tables(1, 12, 14)
    positions = start + torch.arange(rows)
    query = random(rows, heads, 40, dtype=dtype)
    absent = torch.rand(192).to(DEVICE) < 0.3
    absent[start:] = False
    lost = absent.nonzero()[:, 0]
    pages[tables[0, lost // 16].long(), :, lost % 16] = float("nan")  # never written
    plan = tiled([positions], tables, query, pages, parts=2)
    counted = torch.rand(2, rows).to(DEVICE)
    counted[1, 1:] = 0
    given = attention_mass(query, pages, plan, SCALE, start, counted, absent=absent, **options)  # type: ignore[arg-type]
    keys = dense(pages.nan_to_num(), tables[0])[0]
    weights, _ = attention_weights(query, keys, positions, SCALE, absent=absent, **options)  # type: ignore[arg-type]
    expected = (counted @ weights).sum(0)[:, :start] / heads
    assert given.shape == (2, start) and (given[:, absent[:start]] == 0).all()
    assert torch.allclose(given, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mass_over_latents(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    pages = make_pages(14, 1, 16, 20, dtype, "heads first")
    tables, start = make_tables(1, 12, 14), 131
    positions = start + torch.arange(16)
    query = random(16, 6, 40, dtype=dtype)
    absent = torch.zeros(192, dtype=torch.bool, device=DEVICE)
    absent[10:50] = True
    lost = absent.nonzero()[:, 0]
    pages[tables[0, lost // 16].long(), :, lost % 16] = float("nan")  # never written
    plan = tiled([positions], tables, query, pages, parts=2)
    counted = torch.rand(2, 16).to(DEVICE)
    options = {"absent": absent, "rotated": 8}
    given = attention_mass(query, pages, plan, SCALE, start, counted, **options)  # type: ignore[arg-type]
    keys, _ = keys_values(pages.nan_to_num(), tables[0], 8)
    weights, _ = attention_weights(query, keys, positions, SCALE, absent=absent)
    expected = (counted @ weights).sum(0)[:, :start] / 6
    assert torch.allclose(given, expected, rtol=1e-3, atol=1e-5)


def test_the_mass_of_all_keys_is_the_number_of_rows() -> None:
    pages = make_pages(6, 1, 16, 16, torch.float32, "heads first")
    tables = make_tables(1, 6, 6)
    positions = scattered(7, 90)
    query = random(7, 3, 16)
    plan = tiled([positions], tables, query, pages)
    ones = torch.ones(1, 7).to(DEVICE)
    mass = attention_mass(query, pages, plan, SCALE, 90, ones)
    assert float(mass.sum()) == pytest.approx(7, rel=1e-4)
    with pytest.raises(ValueError, match="absent covers 60 keys of each request; there are 90"):
        absent = torch.zeros(60, dtype=torch.bool)
        attention_mass(query, pages, plan, SCALE, 60, ones, absent=absent)
