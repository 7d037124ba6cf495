"""Slots: every part is what was asked for, and the next one is on its way."""

from __future__ import annotations

import torch

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.costs import TRIED_SHARE, FarCosts
from kvboost.model.far.host import HostAttention
from kvboost.model.far.rows import FarRows
from kvboost.model.far.slots import Slots
from support.far_kv import LateTransfers

SHAPE = KVShape(3, 2, 4, torch.float32, torch.device("cpu"))


def rows_of(seed: int, count: int) -> FarRows:
    data = torch.randn(2, 3, 2, 32, 4, generator=torch.Generator().manual_seed(seed))
    return FarRows(data, count, HostAttention(SHAPE))


def read(slots: Slots, rows: FarRows, layer: int) -> torch.Tensor:
    parts = [torch.cat([keys, values]) for keys, values in slots.parts(rows, layer)]
    return torch.cat(parts, 2)


def test_parts_of_all_layers_in_order_are_loaded_once() -> None:
    transfers = LateTransfers()
    slots, rows = Slots(SHAPE, 8, transfers), rows_of(1, 21)
    for _ in range(2):
        for layer in range(3):
            assert torch.equal(read(slots, rows, layer), rows.data[:, layer, :, :21])
    assert transfers.num_loads == 2 * 3 * 3 + 2  # two are loaded for a third pass


def test_other_rows_and_more_rows_are_not_taken_for_what_was_loaded_ahead() -> None:
    slots, first, second = Slots(SHAPE, 16, LateTransfers()), rows_of(1, 20), rows_of(2, 20)
    for rows in (first, second, first, FarRows(first.data, 30, HostAttention(SHAPE))):
        assert torch.equal(read(slots, rows, 0), rows.data[:, 0, :, : rows.count])


def test_what_was_loaded_ahead_is_forgotten_when_rows_change() -> None:
    slots, rows = Slots(SHAPE, 32, LateTransfers()), rows_of(1, 20)
    read(slots, rows, 0)
    slots.forget()
    rows.data[:, 1].fill_(5.0)
    assert torch.equal(read(slots, rows, 1), torch.full((2, 2, 20, 4), 5.0))


def test_parts_after_the_rows_that_the_host_attends_to() -> None:
    transfers = LateTransfers()
    slots, rows = Slots(SHAPE, 8, transfers), rows_of(1, 30)
    for layer in (0, 1, 2, 0):
        parts = [keys.clone() for keys, _ in slots.parts(rows, layer, 13)]
        assert torch.equal(torch.cat(parts, 2)[0], rows.data[0, layer, :, 13:30])
    assert transfers.num_loads == 4 * 3 + 2


def test_the_host_gets_the_share_that_takes_as_long_as_the_copy() -> None:
    costs = FarCosts()
    assert costs.host_share(1) == 0, "the copy was not measured yet"
    costs.observe_stream(1000, 2.0)
    assert costs.host_share(1) == TRIED_SHARE
    costs.observe_host(500, 1, 1 / 3)
    assert costs.host_share(1) == 0.75
    assert costs.host_share(8) == TRIED_SHARE  # not measured for so many rows
    costs.observe_host(1000, 8, 100.0)
    assert costs.host_share(8) == 0 and costs.host_share(1) == 0.75
    costs.observe_host(1000, 2, 0.01)
    assert costs.host_share(3) == 1


def test_small_changes_of_pace_do_not_change_the_share() -> None:
    costs = FarCosts()
    costs.observe_stream(1000, 1.0)
    costs.observe_host(1000, 1, 1.0)
    assert costs.host_share(1) == 0.5
    for _ in range(3):
        costs.observe_host(1000, 1, 1.05)
    assert costs.host_share(1) == 0.5
    for _ in range(20):
        costs.observe_host(1000, 1, 3.0)
    assert costs.host_share(1) == 0.25
