"""Forwards over pages as CUDA graphs.

A forward of a few hundred rows is over sooner than Python can launch its kernels. So the whole
forward, with our attention and our hooks in it, is captured once for each size: in vLLM when it
starts, in our own engine when it is first needed. What differs between requests is data in buffers
of fixed size: padding has position -1, writes nothing, and is attended to by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from kvboost.model.execution.segment import Hook, Rules
from kvboost.model.paged.graphs import Recorded
from kvboost.model.triton import mass
from kvboost.model.triton.host import send_into
from kvboost.model.triton.pages import slots_of
from kvboost.model.triton.rows import (
    ITEM_FIELDS,
    MOST_PARTS,
    TILE_FIELDS,
    Ints,
    Tile,
    TiledRows,
    cut,
    keys_of,
    pick_parts,
    programs_at_once,
)
from kvboost.model.triton.shift import ShiftPlan
from kvboost.reuse.paged.hooks import PROBES, REPAIRS, Attention, EnoughLayers
from kvboost.reuse.paged.kernels import GpuKernels, KVPages, PagedMass, PagedShift
from kvboost.reuse.probe import KINDS, row_weights
from kvboost.reuse.repair import PROBE_ROWS, probed_layers
from kvboost.reuse.shift import BLOCKS

SIZES = (*range(64, 512, 64), *range(512, 2049, 128))
"""Rows of the graphs: up to what a load computes at a time (``slice_rows``)."""
MOST_SPANS = 256
"""Spans that one forward can shift."""

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Runs a function and returns one that does the same again, with the same result."""


class Model(Protocol):
    """A model over its pages; ``attention`` and ``hook`` serve every layer. Rows with a slot of -1
    are padding. The result stays where it is when the forward is replayed."""

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        hook: Hook | None,
        attention: Attention,
    ) -> Any: ...


class Graphs:
    """Captured forwards for vLLM's requests of up to ``capacity`` rows."""

    def __init__(
        self,
        model: Model,
        kernels: GpuKernels,
        heads: int,
        capacity: int,
        *,
        sizes: tuple[int, ...] = SIZES,
        capture: Capture | None = None,
    ) -> None:
        capture = capture or capture_cuda()

        def repair(size: int) -> CapturedForward[Any]:
            rows = FixedRows(kernels, heads, size, capacity)
            hook = FixedShift(kernels, size, capacity, rows.table)
            return CapturedForward(model, kernels, rows, hook, capture)

        probed = FixedRows(kernels, heads, PROBE_ROWS, capacity, in_pages=True)
        # The largest first: the others then fit into its memory.
        self._forwards: dict[str | None, list[CapturedForward[Any]]] = {
            REPAIRS: [repair(size) for size in sorted(sizes, reverse=True)],
            PROBES: [CapturedForward(model, kernels, probed, FixedMass(kernels, probed), capture)],
        }
        self.num_replays = 0

    def __call__(
        self, ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, hook: Hook | None
    ) -> bool:
        """Runs a forward as ``SparseForward`` does; False if there is no graph for it."""
        forwards = reversed(self._forwards.get(REPAIRS if hook is None else hook.kind, []))
        found = next((each for each in forwards if each.has_room(len(rows))), None)
        if found is None or not found.run(ids, rows, table, hook):
            return False
        self.num_replays += 1
        return True


H = TypeVar("H")
"""The hook of a request, or None."""


class FixedHook(Hook, Generic[H]):
    """Does in a captured forward what the hook of any request would do."""

    hidden: torch.Tensor | None = None
    """Keys that the forward does not attend to."""

    def begin(self) -> None:
        """The forward begins, on the device."""

    def load(self, hook: H) -> bool:
        """Prepares for a request; False if it does not fit."""
        raise NotImplementedError

    def finish(self, hook: H) -> None:
        """Gives what it has seen to the hook."""


class CapturedForward(Generic[H]):
    """A captured forward: of a repair, of a probe, or of rows that nothing sees."""

    def __init__(
        self,
        model: Model,
        kernels: GpuKernels,
        rows: FixedRows,
        hook: FixedHook[H] | None,
        capture: Capture,
    ) -> None:
        """Captured while the buffers are empty, so that it changes nothing."""
        self._rows, self._hook = rows, hook
        attention = kernels.attend_rows(rows.paged, None if hook is None else hook.hidden)

        def forward() -> Any:
            if hook is not None:
                hook.begin()
            return model(*rows.inputs(), hook, attention)

        self._replay = capture(forward)
        self.result: Any = None
        """The model's result; it changes with the next run."""

    def has_room(self, num_rows: int) -> bool:
        return self._rows.has_room(num_rows)

    def run(self, ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, hook: H) -> bool:
        """Runs a forward as ``SparseForward`` does; False if it does not fit."""
        own = self._hook
        if not self._rows.fits(table) or (own is not None and not own.load(hook)):
            return False
        self._rows.load(ids, rows, table)
        self.result = self._replay()
        if own is not None:
            own.finish(hook)
        return True


class FixedRows:
    """The inputs of a forward of up to ``size`` rows. ``last``, int32 ``[1]``, is where the last
    row is; ``table``, int32, has the pages of the request. Rows that are attended to ``in_pages``
    are never copied into one piece for that."""

    def __init__(
        self, kernels: GpuKernels, heads: int, size: int, capacity: int, *, in_pages: bool = False
    ) -> None:
        pages = kernels.pages
        self._page, self._size = pages.size, size
        group = heads // pages.num_kv_heads
        dense = None if in_pages else kernels.dense_tile(heads, size, capacity)
        tile = dense or kernels.tile(heads, size)
        self._tiles = FixedTiles(_tiles(size, tile, group), tile, group, pages)
        parts = [size, size, 1, 1, self._tiles.size]
        self._inputs = torch.zeros(sum(parts), dtype=torch.int32, device=pages.device)
        self._ids, self._positions, self.last, num_keys, work = self._inputs.split(parts)
        self._positions.fill_(-1)
        self.table = torch.zeros(-(-capacity // pages.size), dtype=torch.int32, device=pages.device)
        paged = self._tiles.paged(self._positions, work, self.table[None], capacity)
        self.paged = replace(paged, num_keys=num_keys)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, int32, positions and slots, int64."""
        positions = self._positions.clamp(min=0).long()
        slots = slots_of(positions, self.table, self._page)
        return self._ids, positions, torch.where(self._positions < 0, -1, slots)

    def fits(self, table: torch.Tensor) -> bool:
        return len(table) <= len(self.table)

    def has_room(self, num_rows: int) -> bool:
        return num_rows <= self._size

    def load(self, ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> None:
        """``ids`` and ``rows`` are on the host."""
        number, size = len(rows), self._size
        sent = np.zeros(len(self._inputs), np.int32)
        sent[:number] = ids.numpy()
        positions = sent[size : 2 * size]
        positions[:number], positions[number:] = rows.numpy(), -1
        sent[2 * size : 2 * size + 2] = number - 1, rows[-1] + 1
        self._tiles.fill(sent[2 * size + 2 :], positions)
        send_into(torch.from_numpy(sent), self._inputs)
        self.table[: len(table)].copy_(table, non_blocking=True)


class FixedTiles:
    """The tiles of a captured forward. They have fixed places and their keys differ between
    requests: ``tiles`` are where they start and what they have room for, in rows times the
    ``group`` of heads that share a KV head."""

    def __init__(
        self, tiles: Sequence[tuple[int, int]], tile: Tile, group: int, pages: KVPages
    ) -> None:
        self._tile, self._group, self._kv_heads = tile, group, pages.num_kv_heads
        self._at_once = programs_at_once(pages.device, tile)
        given = [(0, start, 0, room) for start, room in tiles]
        self._tiles = np.array(given, np.int32).reshape(-1, 4)
        self._most_items = len(tiles) + self._at_once // self._kv_heads if tiles else 0
        self.size = self._most_items * len(ITEM_FIELDS) + len(tiles) * len(TILE_FIELDS)
        starts, room = self._tiles[:, 1], self._tiles[:, 3]
        self._first_rows, self._first_heads = np.divmod(starts, group)
        self._end_rows, self._end_heads = np.divmod(starts + room, group)

    def paged(
        self, positions: torch.Tensor, buffer: torch.Tensor, table: torch.Tensor, capacity: int
    ) -> TiledRows:
        """The rows at ``positions``; their tiles will be in ``buffer``."""
        items, tiles = self._parts_of(buffer)
        most = MOST_PARTS, self._most_items
        return TiledRows(positions, items, tiles, table, self._tile, *most, capacity, self._group)

    def fill(self, buffer: Ints, positions: Ints) -> None:
        """Writes the items and tiles of rows at ``positions``; those of padding are -1."""
        if not self._most_items:
            return
        tiles = self._tiles.copy()
        used = np.zeros(len(positions) + 2, np.int32)
        used[1:-1] = positions >= 0
        before = used.cumsum(dtype=np.int32)  # how many rows before each are used
        here = used[1:]
        count = self._group * (before[self._end_rows] - before[self._first_rows])
        count += self._end_heads * here[self._end_rows] - self._first_heads * here[self._first_rows]
        tiles[:, 2] = count
        last = (tiles[:, 1] + np.maximum(count, 1) - 1) // self._group
        keys = keys_of(positions[self._first_rows], positions[last])
        keys = np.where(count > 0, keys, 1)
        parts = pick_parts(keys, self._kv_heads, self._at_once, MOST_PARTS, self._most_items)
        items, described = self._parts_of(buffer)
        found, described[:] = cut(tiles, keys, parts)
        items[: len(found)] = found

    def _parts_of(self, buffer: Any) -> tuple[Any, Any]:
        at = self._most_items * len(ITEM_FIELDS)
        return (
            buffer[:at].reshape(-1, len(ITEM_FIELDS)),
            buffer[at : self.size].reshape(-1, len(TILE_FIELDS)),
        )


def _tiles(num_rows: int, tile: Tile, group: int) -> list[tuple[int, int]]:
    """Where the tiles of so many rows start and what they have room for, in rows times heads."""
    last, step = num_rows * group, tile.rows
    return [(at, min(step, last - at)) for at in range(0, last, step)]


class FixedShift(FixedHook[PagedShift | None]):
    """The shift of any repair of up to ``size`` rows; of none if nothing is to be shifted."""

    def __init__(self, kernels: GpuKernels, size: int, capacity: int, table: torch.Tensor) -> None:
        """``table``, ``[pages]``, will have the pages of the request."""
        self._kernels = kernels
        self._plan = ShiftPlan.empty(MOST_SPANS, BLOCKS, size, capacity, capacity, table)

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._kernels.apply_shift(self._plan, layer, keys, values)

    def load(self, hook: PagedShift | None) -> bool:
        if hook is None:
            self._plan.clear()
            return True
        return self._plan.load(hook.rows)


class FixedMass(FixedHook[PagedMass]):
    """The attention of ``rows``, the last ones of any prompt. Nothing in the forward sees rows that
    are absent: they are not computed yet. The forward ends in the last layer that is observed."""

    def __init__(self, kernels: GpuKernels, rows: FixedRows) -> None:
        device, capacity = kernels.pages.device, rows.paged.end
        self._kernels, self._rows = kernels, rows.paged
        self._bands = probed_layers(len(kernels.pages.caches))
        # In one piece: weights of the last rows, and which keys are absent.
        self._num_rows = len(self._rows.positions)
        self._weight_bytes = 4 * KINDS * self._num_rows
        size = self._weight_bytes + capacity
        self._data = torch.zeros(size, dtype=torch.uint8, device=device)
        weights = self._data[: self._weight_bytes].view(torch.float32)
        self._weights = weights.view(KINDS, self._num_rows)
        self._absent = self._data[self._weight_bytes :].view(torch.bool)
        self._absent.fill_(True)
        self._end = 0
        """From here on, all keys are absent."""
        self._mass = torch.zeros(2, KINDS, capacity, device=device)
        self.hidden = self._absent

    def begin(self) -> None:
        self._mass.zero_()

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        if (band := self._bands.number(layer)) is None:
            return
        self._mass[band] += mass.attention_mass(
            query[: len(self._rows.positions)],
            self._kernels.pages.caches[layer],
            self._rows,
            rules.scale,
            len(self._absent),
            self._weights,
            window=rules.window,
            softcap=rules.softcap,
            absent=self._absent,
            sinks=rules.sinks,
            rotated=rules.rotated,
        )
        if layer == self._bands.last:
            raise EnoughLayers

    def load(self, hook: PagedMass) -> bool:
        known, num_rows = hook.seen.absent, hook.num_rows
        if num_rows > self._num_rows or hook.seen.bands != self._bands:
            return False
        end = len(known) + num_rows
        sent = np.zeros(self._weight_bytes + end, np.uint8)
        weights = sent[: self._weight_bytes].view(np.float32).reshape(KINDS, -1)
        weights[:, :num_rows] = row_weights(num_rows).numpy()
        sent[self._weight_bytes :][: len(known)] = known.numpy()
        send_into(torch.from_numpy(sent), self._data[: len(sent)])
        if end < self._end:
            self._absent[end : self._end].fill_(True)
        self._end = end
        return True

    def finish(self, hook: PagedMass) -> None:
        hook.give(self._mass[..., : hook.seen.start].contiguous())


def capture_cuda() -> Capture:
    """Captures into memory that all graphs share: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        run()  # compiles what is not compiled yet
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return Recorded(run, graph, run())

    return capture
