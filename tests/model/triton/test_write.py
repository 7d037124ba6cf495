"""Fresh rows, written into pages."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.triton.write import write
from support.paged_kv import make_pages, random
from support.tiny import DEVICE


@pytest.mark.parametrize(
    ("layout", "dim", "dtype"),
    [("heads first", 16, torch.bfloat16), ("tokens first", 24, torch.float32)],
)
def test_rows_go_to_their_slots_and_nothing_else_changes(
    layout: str, dim: int, dtype: torch.dtype
) -> None:
    pages = make_pages(6, 2, 8, dim, dtype, layout)
    slots = torch.tensor([47, 3, -1, 8, 9, 10, -1, *range(16, 32)], device=DEVICE)
    keys, values = (random(1, 2, len(slots), dim, dtype=dtype)[0].transpose(0, 1) for _ in "kv")
    expected = pages.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:  # padding
            continue
        expected[slot // 8, :, slot % 8] = torch.cat([keys[row], values[row]], -1)
    write(keys, values, pages, slots)
    assert torch.equal(pages, expected)


def test_rows_that_are_keys_and_values_in_one() -> None:
    pages = make_pages(3, 1, 8, 20, torch.float32, "heads first")
    slots = torch.tensor([23, -1, 4], device=DEVICE)
    rows, expected = random(3, 1, 40), pages.clone()
    for row, slot in ((0, 23), (2, 4)):
        expected[slot // 8, :, slot % 8] = rows[row]
    write(rows, rows[:], pages, slots)
    assert torch.equal(pages, expected)


def test_rows_that_do_not_fit_the_pages_are_named() -> None:
    pages = make_pages(2, 2, 8, 16, torch.float32, "heads first")
    slots = torch.tensor([1, 2], device=DEVICE)
    rows = random(2, 2, 24)
    with pytest.raises(ValueError, match=r"keys are torch.float32 of shape \(2, 2, 24\)"):
        write(rows, rows, pages, slots)
