"""One request's rows in our own pages, where kernels place, probe and shift them."""

from __future__ import annotations

import torch

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import PLAIN, KVData, Quantizer
from kvboost.model.paged.kv import PagedKV
from kvboost.model.segment import Hook
from kvboost.reuse.assemble import place
from kvboost.reuse.paged.hooks import SegmentHook
from kvboost.reuse.paged.kernels import GpuKernels
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.shift import Spans

PLACED_ROWS = 4096
"""Rows of other devices that are placed together: a copy of them is made on the GPU."""


class PagedRequest:
    """The choice of rows is left to the host: a GPU would wait for its many small steps."""

    device = torch.device("cpu")

    def __init__(
        self, kv: PagedKV, kernels: GpuKernels, quantizer: Quantizer, slice_rows: int
    ) -> None:
        self.slice_rows = slice_rows
        self._kv, self._kernels, self._quantizer = kv, kernels, quantizer
        self._hits: list[Hit] = []
        self._stored: list[torch.Tensor] = []
        self._rows_from_elsewhere = 0
        self._share: float | None = None

    @property
    def _table(self) -> torch.Tensor:
        return self._kv.slab.table[self._kv.holding.row]

    def place(self, hit: Hit, data: KVData, share: float | None = None) -> None:
        if data.bits != 16:
            place(hit, data, self._kv, self._quantizer, share)
            return
        if share != self._share:
            self.finish()
            self._share = share
        stored = data.tensors[PLAIN]
        self._hits.append(hit)
        self._stored.append(stored)
        if stored.device != self._kv.shape.device:
            self._rows_from_elsewhere += stored.shape[3]
            if self._rows_from_elsewhere >= PLACED_ROWS:
                self.finish()

    def finish(self) -> None:
        if self._hits:
            self._kernels.place_rows(self._hits, self._stored, self._table, self._share)
        self._hits, self._stored, self._rows_from_elsewhere = [], [], 0

    def clear(self, rows: range) -> None:
        """Kernels do not read what they do not attend to."""

    def probe(self, hook: Hook, positions: torch.Tensor) -> Hook:
        if not isinstance(hook, AttentionMass):
            return hook
        return SegmentHook(self._kernels.probe(hook, positions, self._table))

    def shift(self, positions: torch.Tensor, spans: Spans) -> Hook | None:
        hook = self._kernels.shift(positions, spans, self._table)
        return None if hook is None else SegmentHook(hook)
