"""The shift over pages, against the shift of KV that is not in pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.triton.pages import slots_of
from kvboost.model.triton.shift import ShiftPlan, ShiftRows, shift
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import BLOCKS, ERROR_WEIGHT, Shift, Spans
from support.paged_kv import dense, make_pages, make_tables, random, scattered
from support.tiny import DEVICE

KV_HEADS, PAGE, PROMPT = 2, 16, 150
SPANS = Spans.of([range(7, 60), range(60, 63), range(80, 140)], PROMPT)


def shift_rows(positions: torch.Tensor) -> ShiftRows:
    weights = SPANS.weights(positions.numpy())
    assert weights is not None
    return ShiftRows.of(positions.numpy(), SPANS.block_of, weights)


@pytest.mark.parametrize(
    ("dtype", "layout", "interleaved"),
    [
        (torch.float32, "heads first", False),
        (torch.float32, "pages inside", True),
        (torch.bfloat16, "tokens first", False),
    ],
)
def test_the_shift_is_that_of_dense_rows(
    dtype: torch.dtype, layout: str, interleaved: bool
) -> None:
    torch.manual_seed(11)
    dim, pairs = 48, 20  # the last 8 channels do not rotate
    pages = make_pages(12, KV_HEADS, PAGE, dim, dtype, layout)
    table = make_tables(1, 10, 12)[0]
    before = pages.clone()
    positions = scattered(45, PROMPT)
    positions = torch.cat([positions[(positions < 60) | (positions > 62)], torch.tensor([61])])
    positions = positions.sort().values  # span 1 has one recomputed row: that gives no mean
    rotation = Rotation(torch.rand(2, pairs), interleaved=interleaved)
    keys, values = (random(len(positions), KV_HEADS, dim, dtype=dtype) for _ in range(2))
    keys[::5], values[1::5] = 9 * keys[::5], 9 * values[1::5]  # they count less than the others

    kv = RequestKV(KVShape(2, KV_HEADS, dim, dtype, torch.device(DEVICE)), PROMPT)
    kv.data[:, 1, :, :PROMPT] = dense(pages, table)[:, :, :PROMPT]
    hook = Shift(rotation, positions.to(DEVICE), SPANS)
    assert hook.useful
    hook.kv = kv
    hook.on_fresh(1, keys, values)

    plan = ShiftPlan.of(shift_rows(positions), table)
    at = rotation.cos_sin(1, torch.arange(PROMPT, device=DEVICE))
    shift(keys, values, pages, plan, at, error_weight=ERROR_WEIGHT, interleaved=interleaved)
    found, expected = dense(pages, table)[:, :, :PROMPT], kv.data[:, 1, :, :PROMPT]
    stale = torch.from_numpy(SPANS.block_of >= 0).to(DEVICE)
    stale[positions.to(DEVICE)] = False  # fresh rows are written by the forward
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    stale_found, stale_expected = (part[:, :, stale].float() for part in (found, expected))
    assert torch.allclose(stale_found, stale_expected, rtol=limit, atol=limit)
    changed = (found != dense(before, table)[:, :, :PROMPT]).any(-1).any(0).any(0)
    shifted = stale.clone()
    shifted[60:63] = False
    assert torch.equal(changed, shifted)
    slots = slots_of(torch.arange(PROMPT, device=DEVICE)[~stale], table, PAGE)
    same = [part.transpose(1, 2).flatten(0, 1)[slots] for part in (pages, before)]
    assert torch.equal(*same)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_shift_of_rows_that_are_keys_and_values_in_one(interleaved: bool) -> None:
    torch.manual_seed(5)
    dim, pairs = 24, 8  # of a half of a row
    pages = make_pages(12, 1, PAGE, dim, torch.float32, "heads first")
    table = make_tables(1, 10, 12)[0]
    positions = scattered(45, PROMPT)
    rotation = Rotation(torch.rand(2, pairs), interleaved=interleaved)
    rows = random(len(positions), 1, 2 * dim)
    rows[::5] = 9 * rows[::5]  # they count less than the others

    kv = RequestKV(KVShape(2, 1, 2 * dim, torch.float32, torch.device(DEVICE), sides=1), PROMPT)
    kv.data[0, 1, :, :PROMPT] = pages[table.long()].transpose(0, 1).flatten(1, 2)[:, :PROMPT]
    hook = Shift(rotation, positions.to(DEVICE), SPANS)
    hook.kv = kv
    hook.on_fresh(1, rows, rows)

    plan = ShiftPlan.of(shift_rows(positions), table)
    at = rotation.cos_sin(1, torch.arange(PROMPT, device=DEVICE))
    shift(rows, rows[:], pages, plan, at, error_weight=ERROR_WEIGHT, interleaved=interleaved)
    found = pages[table.long()].transpose(0, 1).flatten(1, 2)[:, :PROMPT]
    stale = torch.from_numpy(SPANS.block_of >= 0).to(DEVICE)
    stale[positions.to(DEVICE)] = False
    expected = kv.data[0, 1, :, :PROMPT]
    assert torch.allclose(found[:, stale], expected[:, stale], rtol=1e-5, atol=1e-5)


def test_nothing_to_learn_from_shifts_nothing() -> None:
    pages = make_pages(12, KV_HEADS, PAGE, 32, torch.float32, "tokens first")
    before, table = pages.clone(), make_tables(1, 10, 12)[0]
    positions = np.array([0, 1, 149])  # none of them moved
    none = np.zeros((3, BLOCKS, BLOCKS), np.float32)
    plan = ShiftPlan.of(ShiftRows.of(positions, SPANS.block_of, none), table)
    keys = random(3, KV_HEADS, 32)
    table_of = random(PROMPT, 16)
    shift(keys, keys, pages, plan, (table_of, table_of), error_weight=ERROR_WEIGHT)
    assert torch.equal(pages, before)
    with pytest.raises(ValueError, match="cosines cover 100 positions; moved rows end at 140"):
        shift(keys, keys, pages, plan, (table_of[:100], table_of[:100]), error_weight=ERROR_WEIGHT)


def test_a_plan_with_room_shifts_as_one_without() -> None:
    table, many, few = make_tables(1, 10, 12)[0], scattered(45, PROMPT), scattered(12, PROMPT)
    room = ShiftPlan.empty(5, BLOCKS, 60, PROMPT, PROMPT, table)
    cosines = random(PROMPT, 16)
    for positions in (many, few):  # what the first one left does no harm
        rows = shift_rows(positions)
        assert room.load(rows)
        keys, values = (random(60, KV_HEADS, 32) for _ in range(2))
        given = [make_pages(12, KV_HEADS, PAGE, 32, torch.float32, "tokens first")] * 2
        given = [pages.clone() for pages in given]
        for pages, plan in zip(given, (room, ShiftPlan.of(rows, table)), strict=True):
            shift(keys, values, pages, plan, (cosines, cosines), error_weight=ERROR_WEIGHT)
        assert torch.equal(*given)
    sizes = (2, BLOCKS, 60, PROMPT, PROMPT), (3, BLOCKS, 5, 9, 9), (5, 4, 60, PROMPT, PROMPT)
    small = [ShiftPlan.empty(*size, table) for size in sizes]
    assert not any(plan.load(rows) for plan in small)
    room.clear()
    before = pages.clone()
    shift(keys, values, pages, room, (cosines, cosines), error_weight=ERROR_WEIGHT)
    assert torch.equal(pages, before)
