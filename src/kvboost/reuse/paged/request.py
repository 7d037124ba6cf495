"""One request's rows in our own pages, where kernels place, probe and shift them."""

from __future__ import annotations

from functools import partial

from kvboost.cache.admission import Pack
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import PLAIN, KVData
from kvboost.model.execution.kv import RequestKV
from kvboost.reuse.assemble import Packer
from kvboost.reuse.paged.kernels import GpuKernels, TableRows
from kvboost.reuse.paged.stored import PageStore

PLACED_ROWS = 4096
"""Rows of other devices that are placed together: a copy of them is made on the GPU."""


class PagedRequest(TableRows):
    """Rows of one request, in pages."""

    def __init__(
        self,
        kv: RequestKV,
        kernels: GpuKernels,
        packer: Packer,
        slice_rows: int,
        store: PageStore | None = None,
    ) -> None:
        """``store`` keeps the request's pages as chunks; without one, ``packer`` copies rows."""
        assert kv.slab is not None
        super().__init__(kernels, kv.slab.table[kv.holding.row])
        self.slice_rows = slice_rows
        self._store = store
        self._kv, self._packer = kv, packer
        self._groups: list[tuple[list[tuple[Hit, KVData]], float | None]] = []
        """The hits to place, one group after the other."""
        self._rows_from_elsewhere = 0

    def place(self, hit: Hit, data: KVData, share: float | None = None) -> None:
        if data.bits != 16:
            self.finish()  # it may be mixed with what comes before it
            self._packer.place(hit, data, self._kv, share)
            return
        if not self._groups or share != self._groups[-1][1]:
            self._groups.append(([], share))
        self._groups[-1][0].append((hit, data))
        if not data.in_pages and data.tensors[PLAIN].device != self._kv.shape.device:
            self._rows_from_elsewhere += data.num_tokens
            if self._rows_from_elsewhere >= PLACED_ROWS:
                self.finish()

    def finish(self) -> None:
        if self._groups:
            self._kernels.place_rows(self._groups, self._table)
        self._groups, self._rows_from_elsewhere = [], 0

    def packing(self) -> Pack:
        if self._store is None:
            return self._packer.packing(self._kv)
        return partial(self._store.pack, self._kv)

    def clear(self, rows: range) -> None:
        """Kernels do not read what they do not attend to."""
