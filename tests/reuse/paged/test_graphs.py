"""Forwards with inputs of fixed size, as graphs need them, against forwards of just their rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvboost.model import triton
from kvboost.model.execution.segment import Hook, Rules
from kvboost.model.triton.pages import slots_of
from kvboost.reuse.probe import AttentionMass, row_weights
from kvboost.reuse.repair import probed_layers
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Spans
from support.paged_kv import make_pages, make_tables, random, scattered
from support.tiny import DEVICE
from support.torch_kernels import use_torch_kernels

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from kvboost.model.triton.rows import ITEM_FIELDS, TILE_FIELDS, Tile
from kvboost.reuse.paged.graphs import (
    FixedMass,
    FixedRows,
    FixedTiles,
    Graphs,
    _tiles,
    capture_cuda,
)
from kvboost.reuse.paged.hooks import Attention, EnoughLayers
from kvboost.reuse.paged.kernels import GpuKernels

LAYERS, HEADS, KV_HEADS, PAGE, DIM, PROMPT, VOCAB = 4, 4, 2, 16, 16, 90, 50
PROBE_ROWS, CAPACITY = 16, 7 * PAGE


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)


def again(run: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a graph where there is none: it reads the same buffers."""
    return run


class Model:
    """A few layers that attend over pages."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.rows_in: list[int] = []
        self.layers_run = 0
        self._queries = random(LAYERS, VOCAB, HEADS, DIM)
        self._kv = random(2, LAYERS, VOCAB, KV_HEADS, DIM)
        self.caches = [
            make_pages(14, KV_HEADS, PAGE, DIM, torch.float32, "tokens first")
            for _ in range(LAYERS)
        ]

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        hook: Hook | None,
        attention: Attention,
    ) -> None:
        assert (ids.dtype, positions.dtype, slots.dtype) == (torch.int32, *2 * [torch.int64])
        self.rows_in.append(len(ids))
        seen = torch.zeros(len(ids), HEADS, DIM, device=ids.device)
        for layer in range(LAYERS):
            self.layers_run += 1
            keys, values = self._kv[:, layer, ids.long()]
            keys = keys + seen[:, :KV_HEADS] * 0.3
            if hook is not None:
                hook.on_fresh(layer, keys, values)
            for row in range(len(slots)) if ids.device.type == "cpu" else [slice(None)]:
                self._write(layer, slots[row], keys[row], values[row])
            query = self._queries[layer, ids.long()] + seen
            try:
                if hook is not None:
                    hook.on_query(layer, query, Rules(DIM**-0.5))
            except EnoughLayers:
                return
            out = torch.full_like(query, float("nan"))
            attention(layer, query, Rules(DIM**-0.5), out)
            seen = out

    def _write(self, layer: int, slot: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """Padding, with slot -1, goes to the last page, which nothing else uses."""
        both = torch.cat([key, value], -1)
        slot = torch.where(slot < 0, 14 * PAGE - 1, slot)
        self.caches[layer][slot // PAGE, :, slot % PAGE] = both


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def kernels(model: Model) -> GpuKernels:
    pages: Any = SimpleNamespace(
        caches=model.caches,
        size=PAGE,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device(DEVICE),
    )
    return GpuKernels(pages, Rotation(torch.rand(1, DIM // 2).expand(LAYERS, -1)))


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is slow."""
    monkeypatch.setattr("kvboost.reuse.paged.graphs.MOST_SPANS", 3)
    monkeypatch.setattr("kvboost.reuse.paged.graphs.PROBE_ROWS", PROBE_ROWS)


@pytest.fixture
def table() -> torch.Tensor:
    return make_tables(1, 6, 12)[0]


def make_graphs(model: Model, kernels: GpuKernels, *sizes: int) -> Graphs:
    capture = capture_cuda() if DEVICE == "cuda" else again
    return Graphs(model, kernels, HEADS, CAPACITY, sizes=sizes, capture=capture)


def run_plainly(
    model: Model,
    kernels: GpuKernels,
    ids: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    hook: Hook | None,
    absent: torch.Tensor | None = None,
) -> None:
    slots = slots_of(rows.to(DEVICE), table, PAGE)
    attention = kernels.attention(rows, table, HEADS, absent)
    model(ids.to(DEVICE, torch.int32), rows.to(DEVICE), slots, hook, attention)


def content(model: Model, table: torch.Tensor) -> torch.Tensor:
    return torch.stack([cache[table.long()].clone() for cache in model.caches])


def spans() -> Spans:
    return Spans.of([range(7, 40), range(50, 80)], PROMPT)


@pytest.mark.parametrize("shifted", [True, False])
def test_a_repair_in_buffers_is_the_repair(
    model: Model, kernels: GpuKernels, table: torch.Tensor, shifted: bool
) -> None:
    graphs = make_graphs(model, kernels, 32)
    start = [cache.clone() for cache in model.caches]
    for count in (30, 12):  # the buffers keep nothing of a longer repair
        rows = scattered(count, PROMPT)
        ids = torch.randint(0, VOCAB, (count,))
        found = []
        for run in (graphs, lambda *given: run_plainly(model, kernels, *given)):
            for cache, before in zip(model.caches, start, strict=True):
                cache.copy_(before)
            hook = kernels.shift(rows.numpy(), spans(), table) if shifted else None
            assert (hook is not None) == shifted
            ran = run(ids, rows, table, hook)
            assert ran is (True if run is graphs else None)
            found.append(content(model, table))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        assert not torch.equal(found[0], torch.stack([one[table.long()] for one in start]))
    assert graphs.num_replays == 2


@pytest.mark.parametrize("tail", [PROBE_ROWS, 9])
def test_a_probe_in_buffers_sees_what_the_probe_sees(
    model: Model, kernels: GpuKernels, table: torch.Tensor, tail: int
) -> None:
    graphs = make_graphs(model, kernels, 32)
    start = PROMPT - tail
    absent = torch.zeros(PROMPT, dtype=torch.bool)
    absent[:12] = tail < PROBE_ROWS
    rows = torch.arange(start, PROMPT)
    ids = torch.randint(0, VOCAB, (tail,))
    found = []
    for run in (graphs, lambda *given: run_plainly(model, kernels, *given, absent)):
        seen = AttentionMass(probed_layers(LAYERS), absent[:start])
        model.layers_run = 0
        ran = run(ids, rows, table, kernels.probe(seen, rows, table))
        assert ran is (True if run is graphs else None)
        if DEVICE == "cpu":
            assert model.layers_run == probed_layers(LAYERS).last + 1 < LAYERS
        seen.wait()
        found.append(seen.mass)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert float(found[0].sum()) > 0
    assert not found[0][..., absent[:start]].any()


def test_what_has_no_graph_is_left_to_others(
    model: Model, kernels: GpuKernels, table: torch.Tensor
) -> None:
    graphs = make_graphs(model, kernels, 32)
    before = content(model, table)

    few, many = scattered(20, PROMPT), scattered(33, PROMPT)
    ids = torch.zeros(33, dtype=torch.int64)
    assert not graphs(ids, many, table, None)  # too many rows
    assert not graphs(ids[:20], few, table, Hook())
    assert not graphs(ids[:20], few, table.repeat(2), None)  # too many pages
    quarters = [range(at, at + PROMPT // 4) for at in range(0, PROMPT // 4 * 4, PROMPT // 4)]
    crowded = Spans.of(quarters, PROMPT)
    assert not graphs(ids[:20], few, table, kernels.shift(few.numpy(), crowded, table))
    assert torch.equal(content(model, table), before)
    assert graphs.num_replays == 0


def test_tiles_are_filled_as_counted_row_by_row(kernels: GpuKernels) -> None:
    size, group, tile = 40, 3, Tile(16, 32, 4, 1)
    places = _tiles(size, tile, group)
    tiles = FixedTiles(places, tile, group, kernels.pages)
    for number in (40, 14, 1):
        positions = np.full(size, -1, np.int32)
        positions[:number] = 3 * np.arange(number)
        buffer = np.zeros(tiles.size, np.int32)
        tiles.fill(buffer, positions)
        items = buffer[: -len(places) * len(TILE_FIELDS)].reshape(-1, len(ITEM_FIELDS))
        found = [item[1:] for item in items.tolist() if item[3]]
        of_rows = positions.repeat(group) >= 0
        for start, room in places:
            own = sorted(item[3:5] for item in found if item[0] == start)
            count = int(of_rows[start : start + room].sum())
            assert {item[1] for item in found if item[0] == start} == {count}
            assert own == [[part, len(own)] for part in range(len(own))]
        assert {item[0] for item in found} == {start for start, _ in places}


def test_a_probe_forgets_the_keys_of_a_longer_prompt(model: Model, kernels: GpuKernels) -> None:
    rows = FixedRows(kernels, HEADS, PROBE_ROWS, CAPACITY, in_pages=True)
    mass = FixedMass(kernels, rows)
    table = make_tables(1, 6, 12)[0]
    for start, num_rows in ((80, 10), (30, 16), (50, 3)):
        absent = torch.rand(start) < 0.3
        seen = AttentionMass(probed_layers(LAYERS), absent)
        hook = kernels.probe(seen, torch.arange(start, start + num_rows), table)
        assert mass.load(hook)
        expected = torch.ones(CAPACITY, dtype=torch.bool)
        expected[:start], expected[start : start + num_rows] = absent, False
        assert torch.equal(mass._absent.cpu(), expected)
        assert torch.equal(mass._weights[:, :num_rows].cpu(), row_weights(num_rows))
        assert not mass._weights[:, num_rows:].any()
