"""The rows of a decode step, in buffers that stay where they are, and what steps share."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.model.attention import Batch
from kvboost.model.paged.graphs import Capture
from kvboost.model.paged.row_batch import Fresh, RowBatch
from kvboost.model.paged.sampling import DeviceSampling
from kvboost.model.paged.slab import Slab
from kvboost.model.segment import Segment
from kvboost.model.triton.attention import attend
from kvboost.model.triton.rows import MOST_SPLITS, PagedRows, Tile, programs_at_once


class RunModel(Protocol):
    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs token ids at positions, both int64 ``[rows]``; returns logits ``[rows, vocab]``, or
        those of the ``wanted`` rows."""


class Beside(Protocol):
    """Consecutive rows of one request that a step computes beside its own, through buffers of a
    fixed size."""

    @property
    def most_rows(self) -> int: ...

    def takes(self, segment: Segment) -> bool: ...

    def load(self, segment: Segment) -> None:
        """Fills the buffers, before a step."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots, all int64 ``[most_rows]``."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of ``query``, ``[most_rows, heads, dim]``, into ``out``."""


class StepTables(Protocol):
    """What all steps over one slab use."""

    slab: Slab
    run_model: RunModel
    capture: Capture
    sampling: DeviceSampling

    def slot_of(self, segment: Segment) -> int:
        """Where the adapter of a segment is; negative if it has none."""


class StepBatch(RowBatch):
    """Rows of different requests, each after all rows of its request, and those ``beside`` them.
    ``positions``, ``slots`` and ``requests`` are filled before every step."""

    def __init__(self, slab: Slab, size: int, beside: Beside | None = None) -> None:
        super().__init__(slab)
        device = slab.shape.device
        self._beside = beside
        more = beside.most_rows if beside is not None else 0
        self.slots = torch.zeros(size + more, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int32, device=device)
        row = torch.arange(size, dtype=torch.int32, device=device)
        self._tiles = torch.stack([torch.zeros_like(row), row, torch.ones_like(row)], 1)
        self._rows: dict[int, PagedRows] = {}

    @property
    def requests(self) -> torch.Tensor:
        """int32 ``[rows]``: the rows of the requests in the slab's table."""
        return self._tiles[:, 0]

    def attend_rows(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        *,
        fresh: Fresh | None = None,
    ) -> torch.Tensor:
        rows, own = self._rows_for(query.shape[1]), len(self.positions)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        pages = self.pages(layer)
        attend(query[:own], pages, rows, scale, window=window, soft_cap=softcap, out=out[:own])
        if self._beside is not None:
            self._beside.attend(layer, query[own:], scale, window, softcap, out[own:])
        return out

    def _rows_for(self, heads: int) -> PagedRows:
        """The rows for the kernel. A tile is split over its keys as far as the device has programs
        to spare: lengths are not known when a graph is recorded."""
        if heads not in self._rows:
            shape, size = self._slab.shape, len(self.positions)
            group = heads // shape.num_kv_heads
            tile = Tile.pick(group, shape.dtype, shape.head_dim)
            spare = programs_at_once(shape.device, tile) // (size * shape.num_kv_heads)
            splits = max(1, min(spare, MOST_SPLITS))
            self._rows[heads] = PagedRows(
                self.positions,
                self._tiles,
                self._slab.table,
                tile,
                splits,
                self._slab.most_rows,
                group,
            )
        return self._rows[heads]
