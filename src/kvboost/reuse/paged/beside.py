"""Rows of one request that a decode step computes beside its own.

A step is bound by reading the weights, so that some more rows in it take little more time: rows of
a prompt that are computed again, exactly.
"""

from __future__ import annotations

import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from kvboost.model.paged.slab import PAGE, SCRATCH, Slab
from kvboost.reuse.paged.graphs import FixedRows
from kvboost.reuse.paged.kernels import GpuKernels

ROWS = 112
"""With those of up to 16 requests, so many rows are one tile of a matrix product; a second tile
would take as long again. Whole tiles of attention may be some rows fewer."""


class RowsBeside:
    """Up to ``most_rows`` consecutive rows in buffers of fixed size, which have room for the step's
    own row."""

    def __init__(self, kernels: GpuKernels, slab: Slab, heads: int, capacity: int) -> None:
        group = heads // kernels.pages.num_kv_heads
        self.num_rows = kernels.tile(heads, ROWS).whole(ROWS, group)
        self.most_rows = self.num_rows - 1
        self._slab = slab
        self._rows = FixedRows(kernels, heads, self.num_rows, capacity)
        self.attend = kernels.attend_rows(self._rows.paged)

    def takes(self, segment: Segment) -> bool:
        kv = segment.kv
        return (
            kv.slab is self._slab
            and segment.is_plain
            and len(segment) <= self.most_rows
            and segment.num_logits == 0
            and segment.hook is None
            and segment.until is None
            and kv.own_start <= segment.first
            and segment.end <= kv.capacity
            and self._rows.fits(self._table(kv))
        )

    @property
    def last(self) -> torch.Tensor:
        return self._rows.last.long()

    def load(self, segment: Segment, own: int | None = None) -> None:
        host = torch.device("cpu")
        ids, positions = segment.token_ids.to(host), segment.position_ids(host)
        if own is not None:
            ids = torch.nn.functional.pad(ids, (0, 1))
            positions = torch.cat([positions, torch.tensor([own])])
        self._rows.load(ids, positions, self._table(segment.kv))

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, positions, slots = self._rows.inputs()
        return ids.long(), positions, slots.clamp(min=SCRATCH * PAGE)

    def _table(self, kv: RequestKV) -> torch.Tensor:
        return self._slab.table[kv.holding.row, : len(kv.holding.pages)]
