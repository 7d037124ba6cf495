"""The products of adapters in ``adapters.c`` against torch, over rows of many adapters."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.model import native
from kvboost.model.adapters.adapter import Adapter, Delta
from kvboost.model.native.adapters import LINEARS, Changes, ChangeTables, halved
from kvboost.model.native.kernels import Kernels
from support.kernel_forms import each_dtype

DEPTHS = (32, 96, 160)
"""Of the rows. All linear layers read the same rows here."""
QUERIES, KEYS = 64, 32
GATED = (16, 96, 1040)
"""Columns of the gated layers; more than are added up at a time, too."""
PRODUCTS = ((0, 3), (3, 1), (4, 2), (6, 1))
"""The first linear layer of each product, and how many it has."""

Run = tuple[int, int | None]
"""How many rows, and the number of their adapter, if they have one."""


@dataclass
class Rows:
    """What ``Changes`` reads of ``AdaptedRows``."""

    runs: list[tuple[slice, Adapter]]
    num_rows: int


def make_adapter(
    number: int, ranks: Sequence[int], depth: int, widths: Sequence[int], dtype: torch.dtype
) -> Adapter:
    """Ranks of 0 leave a linear layer alone. In float32, every other adapter has weights that the
    kernels read as 16 bits."""
    generator = torch.Generator().manual_seed(number)
    saved = torch.bfloat16 if number % 2 else torch.float32

    def random(rank: int, size: int) -> torch.Tensor:
        return torch.randn(rank, size, generator=generator).div(4).to(saved).to(dtype)

    deltas = {
        f"layer.{path}": Delta(random(rank, depth), random(rank, width))
        for path, rank, width in zip(LINEARS, ranks, widths, strict=True)
        if rank
    }
    assert all((halved(one) is not None) <= bool(number % 2) for one in deltas.values())
    return Adapter(str(number), max(ranks), deltas)


def adapt(
    rows: torch.Tensor,
    out: Sequence[torch.Tensor],
    runs: Sequence[Run],
    adapters: Sequence[Adapter],
    threads: int,
) -> list[torch.Tensor]:
    """What the kernels make of the outputs of the four products of a layer."""
    tables, kernels = ChangeTables(), Kernels(rows.dtype)
    tables.add_layer(0, "layer", QUERIES, KEYS)
    adapted, first = Rows([], len(rows)), 0
    for count, number in runs:
        if number is not None:
            adapted.runs.append((slice(first, first + count), adapters[number]))
        first += count
    results = [one.clone() for one in out]
    if adapted.runs:
        changes = Changes(adapted, tables, kernels)  # type: ignore[arg-type]
        for (linear, parts), result in zip(PRODUCTS, results, strict=True):
            native.library(rows.dtype).kvboost_adapt(
                *(c_void_p(changes.address), c_void_p(changes.table[0, linear:].ctypes.data)),
                *(c_int32(parts), c_void_p(rows.data_ptr())),
                *(c_int32(size) for size in rows.shape),
                *(c_void_p(result.data_ptr()), c_int32(result.shape[1]), c_int32(threads)),
            )
    return results


def expected(
    rows: torch.Tensor,
    out: Sequence[torch.Tensor],
    runs: Sequence[Run],
    adapters: Sequence[Adapter],
) -> list[torch.Tensor]:
    """The same by the definition, in float64."""
    results = [one.double() for one in out]
    gate_up = results[2].view(len(rows), -1, 2, 16)
    places = [
        *results[0].split((QUERIES, KEYS, KEYS), dim=1),
        results[1],
        *(gate_up[:, :, part] for part in range(2)),
        results[3],
    ]
    first = 0
    for count, number in runs:
        part = slice(first, first + count)
        first += count
        for path, place in zip(LINEARS, places, strict=True):
            delta = None if number is None else adapters[number].deltas.get(f"layer.{path}")
            if delta is not None:
                change = rows[part].double() @ delta.down.double().t() @ delta.up.double()
                place[part] += change.view(place[part].shape)
    return results


@each_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_products_of_adapters_are_torchs_and_do_not_depend_on_the_rows_beside(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    depth, gated = data.draw(st.sampled_from(DEPTHS)), data.draw(st.sampled_from(GATED))
    widths = (QUERIES, KEYS, KEYS, 48, gated, gated, 48)
    ranks = st.lists(st.integers(0, 9), min_size=7, max_size=7).filter(any)
    adapters = [
        make_adapter(number, data.draw(ranks), depth, widths, dtype)
        for number in range(data.draw(st.integers(1, 3)))
    ]
    which = st.none() | st.integers(0, len(adapters) - 1)
    runs = data.draw(st.lists(st.tuples(st.integers(1, 9), which), min_size=1, max_size=6))
    threads = data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    total = sum(count for count, _ in runs)
    rows = torch.randn(total, depth, generator=generator).to(dtype)
    sizes = (QUERIES + 2 * KEYS, 48, 2 * gated, 48)
    out = [torch.randn(total, size, generator=generator).to(dtype) for size in sizes]

    together = adapt(rows, out, runs, adapters, threads)
    limit = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    for given_, wanted in zip(together, expected(rows, out, runs, adapters), strict=True):
        torch.testing.assert_close(given_.double(), wanted, rtol=limit, atol=limit)
    first = 0
    for count, number in runs:
        part = slice(first, first + count)
        first += count
        alone = adapt(
            *(rows[part].clone(), [one[part].clone() for one in out]),
            [(count, number)],
            adapters,
            1,
        )
        assert all(torch.equal(one[part], own) for one, own in zip(together, alone, strict=True))
