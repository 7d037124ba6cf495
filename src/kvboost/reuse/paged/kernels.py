"""Our Triton kernels over pages: placing stored rows, attention, probes and the shift. What they do
in one launch, torch does elsewhere; tests compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import PLAIN, KVData
from kvboost.model.execution.segment import Hook, Rules
from kvboost.model.paged.slab import PAGE
from kvboost.model.triton import attention, mass, move, shift
from kvboost.model.triton.host import HostCopy
from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.rows import Tile, TiledRows, dense_tile
from kvboost.model.triton.shift import ShiftPlan, ShiftRows
from kvboost.model.triton.take import take
from kvboost.model.triton.warm import warm_up
from kvboost.reuse.paged.hooks import PROBES, REPAIRS, Attention, EnoughLayers
from kvboost.reuse.paged.stored import in_pages
from kvboost.reuse.probe import KINDS, AttentionMass, Probe, row_weights
from kvboost.reuse.rope import CosSin, Rotation
from kvboost.reuse.shift import BLOCKS, ERROR_WEIGHT, Positions, Spans

MOST_DENSE_BYTES = 1 << 29
"""The most memory for the keys and values of a request in one piece, one layer at a time."""


NO_TURN = np.array([1, 0], np.float32).reshape(2, 1, 1, 1)
"""Cosine and sine of models without rotary positions, whose rows stay where they are."""
Placed = tuple[Sequence[tuple[Hit, KVData]], "float | None"]
"""Hits, each with the rows of its chunk, and their share if they are mixed with what is in
place."""


class KVPages(Protocol):
    """The KV of all layers in pages."""

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """Of each layer ``[pages, kv_heads, size, 2 * head_dim]``, or as wide as ``head_dim`` if
        rows are keys and values in one."""

    @property
    def size(self) -> int:
        """Rows of a page."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


class GpuKernels:
    """``rotation`` is None for a model without rotary positions, whose rows cannot be moved."""

    def __init__(self, pages: KVPages, rotation: Rotation | None) -> None:
        self.pages = pages
        self._layers = PagedLayers(pages.caches)
        self._rotation = rotation
        self._tables: list[CosSin] = []
        self._own_pages: move.Source | None = None

    @property
    def rotation(self) -> Rotation:
        assert self._rotation is not None, "rows of a model without rotary positions do not move"
        return self._rotation

    def warm_up(self, heads: int) -> None:
        """Compiles the kernels, so that no request waits for it."""
        pairs = self.rotation.cos_sin(0, torch.zeros(1))[0].shape[1]
        warm_up(
            self._layers,
            heads,
            pairs,
            BLOCKS,
            interleaved=self.rotation.interleaved,
            joined=self.pages.head_dim > self._layers.dim,
        )

    def place_rows(self, groups: Sequence[Placed], table: torch.Tensor) -> None:
        """Writes the rows of hits into pages, their keys rotated, in all layers at once, group by
        group. With a share, a group is mixed with what is in place."""
        distances = sorted({hit.rotated_by for stored, _ in groups for hit, _ in stored})
        number = {distance: number for number, distance in enumerate(distances)}
        spans = [
            [self._span(hit, data, number[hit.rotated_by]) for hit, data in stored]
            for stored, _ in groups
        ]
        rotation = self._rotation
        turns = NO_TURN if rotation is None else rotation.turns(distances)
        interleaved = rotation is not None and rotation.interleaved
        several = move.MovePlan.of(spans, turns, table, self._layers)
        for rows, (_, share) in zip(several, groups, strict=True):
            move.move(rows, self._layers, interleaved=interleaved, share=share)

    def take_rows(
        self, spans: Sequence[tuple[int, int]], table: Sequence[int]
    ) -> list[torch.Tensor]:
        """Copies of rows of all layers, as chunks hold them. A span is ``(start, rows)``, counted
        from the first row of the pages ``table``."""
        return take(spans, table, self._layers)

    def _span(self, hit: Hit, data: KVData, rotation: int) -> move.StoredSpan:
        """The stored rows of a hit, in full precision, on the device."""
        if (paged := in_pages(data)) is not None:
            pages, start = paged.kept.pages, paged.first + hit.offset
            if self._own_pages is None:
                slab = paged.kept.slab
                self._own_pages = move.Source(slab.rows(0), slab.shape.num_kv_heads * PAGE)
            source = self._own_pages
            return move.StoredSpan(source, start, hit.num_tokens, hit.start, rotation, pages)
        rows = data.tensors[PLAIN].to(self.pages.device, non_blocking=True)
        source = move.Source(rows)
        return move.StoredSpan(source, hit.offset, hit.num_tokens, hit.start, rotation)

    def attention(
        self,
        rows: torch.Tensor,
        table: torch.Tensor,
        heads: int,
        absent: torch.Tensor | None = None,
    ) -> Attention:
        """As :meth:`attend_rows`, of rows and absent keys that are on the host."""
        if absent is not None:
            absent = absent.to(self.pages.device, non_blocking=True)
        return self.attend_rows(self.rows(rows, table, heads), absent)

    def attend_rows(self, rows: TiledRows, absent: torch.Tensor | None = None) -> Attention:
        """Attention of ``rows`` over the pages; not to keys that are ``absent``, ``[keys]``."""
        hidden = None if absent is None else absent[None]

        def attend(
            layer: int, query: torch.Tensor, rules: Rules, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            pages = self.pages.caches[layer]
            return attention.attend(query, pages, rows, *rules, absent=hidden, out=out)

        return attend

    def rows_of(self, table: torch.Tensor) -> TableRows:
        """The rows of the request whose pages are ``table``."""
        return TableRows(self, table)

    def probe(self, seen: AttentionMass, rows: torch.Tensor, table: torch.Tensor) -> PagedMass:
        return PagedMass(self, seen, rows, table)

    def shift(self, part: Positions, spans: Spans, table: torch.Tensor) -> PagedShift | None:
        """A hook that shifts the moved rows of ``spans``; None if there is nothing to shift."""
        if (weights := spans.weights(part)) is None:
            return None
        return PagedShift(self, ShiftRows.of(part, spans.block_of, weights), table)

    def apply_shift(
        self, plan: ShiftPlan, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Shifts rows of a layer, given the fresh keys and values of a segment."""
        if not layer:  # its keys and values depend on the token alone
            return
        shift.shift(
            keys,
            values,
            self.pages.caches[layer],
            plan,
            self.rotations(plan.end)[layer],
            error_weight=ERROR_WEIGHT,
            interleaved=self.rotation.interleaved,
        )

    def rows(self, rows: torch.Tensor, table: torch.Tensor, heads: int) -> TiledRows:
        dense = self.dense_tile(heads, len(rows), int(rows[-1]) + 1)
        return TiledRows.of(
            [rows],
            table[None],
            page=self.pages.size,
            heads=heads,
            kv_heads=self.pages.num_kv_heads,
            dtype=self.pages.dtype,
            tile=dense or self.tile(heads, len(rows)),
        )

    def tile(self, heads: int, num_rows: int) -> Tile:
        """The tile for so many rows of one request."""
        group = heads // self.pages.num_kv_heads
        return Tile.over(self.pages.caches[0], group * num_rows)

    def dense_tile(self, heads: int, num_rows: int, num_keys: int) -> Tile | None:
        """The tile for so many rows of one request, if up to ``num_keys`` keys of a layer are
        copied into one piece for them."""
        pages = self.pages
        row_bytes = 2 * pages.num_kv_heads * pages.head_dim * pages.dtype.itemsize
        if num_keys * row_bytes > MOST_DENSE_BYTES:
            return None
        group = heads // pages.num_kv_heads
        return dense_tile(pages.device, pages.dtype, pages.head_dim, group * num_rows)

    def rotations(self, end: int) -> list[CosSin]:
        """Cosine and sine of every position before ``end``, in each layer."""
        kinds = self.rotation.kinds
        if not self._tables or len(self._tables[0][0]) < end:
            known = len(self._tables[0][0]) if self._tables else 0
            positions = torch.arange(max(end, 2 * known))
            tables = (self.rotation.cos_sin(layer, positions) for layer in _first_of_each(kinds))
            device = self.pages.device
            self._tables = [(cos.to(device), sin.to(device)) for cos, sin in tables]
        return [self._tables[kind] for kind in _numbered(kinds)]


class TableRows:
    """The rows of a request whose pages are ``table``, where kernels probe and shift them."""

    def __init__(self, kernels: GpuKernels, table: torch.Tensor) -> None:
        self._kernels, self._table = kernels, table

    def probe(self, probe: Probe, positions: torch.Tensor) -> Hook:
        return probe.in_pages(lambda mass: self._kernels.probe(mass, positions, self._table))

    def shift(self, positions: Positions, spans: Spans) -> Hook | None:
        return self._kernels.shift(positions, spans, self._table)


def _first_of_each(kinds: Sequence[int]) -> list[int]:
    """The first layer of each kind."""
    return [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]


def _numbered(kinds: Sequence[int]) -> list[int]:
    """The kind of each layer, numbered in the order of ``_first_of_each``."""
    order = list(dict.fromkeys(kinds))
    return [order.index(kind) for kind in kinds]


class PagedMass(Hook):
    """Gives ``seen`` the attention of the last rows of a forward, which are at ``rows``."""

    kind = PROBES

    def __init__(
        self, kernels: GpuKernels, seen: AttentionMass, rows: torch.Tensor, table: torch.Tensor
    ) -> None:
        self.seen, self.num_rows = seen, len(rows)
        self._kernels, self._rows, self._table = kernels, rows, table
        self._tiled: TiledRows | None = None

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        if (band := self.seen.bands.number(layer)) is None:
            return
        if self._tiled is None:
            self._mass = torch.zeros(2, KINDS, self.seen.start, device=query.device)
            self._tiled = self._kernels.rows(self._rows, self._table, query.shape[1])
            absent = torch.nn.functional.pad(self.seen.absent, (0, self.num_rows))
            self._absent = absent.to(query.device, non_blocking=True)
            self._weights = row_weights(self.num_rows).to(query.device, non_blocking=True)
        self._mass[band] += mass.attention_mass(
            query[-self.num_rows :],
            self._kernels.pages.caches[layer],
            self._tiled,
            rules.scale,
            self.seen.start,
            self._weights,
            window=rules.window,
            softcap=rules.softcap,
            absent=self._absent,
            sinks=rules.sinks,
            rotated=rules.rotated,
        )
        if layer == self.seen.bands.last:
            self.give(self._mass)
            raise EnoughLayers

    def give(self, mass: torch.Tensor) -> None:
        """Hands over what was seen. The host goes on meanwhile."""
        copy = HostCopy(mass)
        self.seen.mass, self.seen.wait = copy.values, copy.wait
        self.seen.is_complete = copy.is_done


class PagedShift(Hook):
    """Shifts the moved rows that ``rows`` name, of the request whose pages are ``table``."""

    kind = REPAIRS

    def __init__(self, kernels: GpuKernels, rows: ShiftRows, table: torch.Tensor) -> None:
        self.rows = rows
        self._kernels, self._table = kernels, table

    @cached_property
    def _plan(self) -> ShiftPlan:
        return ShiftPlan.of(self.rows, self._table)

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._kernels.apply_shift(self._plan, layer, keys, values)
