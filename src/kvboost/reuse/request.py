"""One request's rows as reuse sees them: known rows are placed there, the last rows of the prompt
probe them, and a repair shifts them."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.cache.admission import Pack
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVData
from kvboost.model.execution.kv import LayerRows, RequestKV
from kvboost.model.execution.segment import Hook
from kvboost.reuse.assemble import Packer
from kvboost.reuse.driver import RepairedRows
from kvboost.reuse.probe import Probe
from kvboost.reuse.rope import AnyRotation
from kvboost.reuse.shift import Positions, Shift, Spans


class RequestRows(RepairedRows, Protocol):
    """The contract for rows in buffers and in pages."""

    @property
    def slice_rows(self) -> int | None:
        """The most rows that a repair runs at a time, if there is such a limit."""

    def place(self, hit: Hit, data: KVData, share: float | None = None) -> None:
        """Copies the rows of a hit into place, at the latest when ``finish`` is called. With a
        ``share``, they are mixed with the rows that are there, which have the rest."""

    def finish(self) -> None: ...

    def packing(self) -> Pack:
        """Gives rows of the request for chunks."""

    def clear(self, rows: range) -> None:
        """Prepares rows that are not known: a probe does not attend to them."""


class HookedRows:
    """Rows that hooks see and shift layer by layer, with torch or the kernels of CPUs."""

    def __init__(self, rows: LayerRows, rotation: AnyRotation | None) -> None:
        self._rows, self._rotation = rows, rotation

    def probe(self, probe: Probe, positions: torch.Tensor) -> Hook:
        probe.kv = self._rows
        return probe

    def shift(self, positions: Positions, spans: Spans) -> Hook | None:
        if self._rotation is None:
            return None
        on_device = torch.from_numpy(positions).to(self._rows.shape.device)
        shift = Shift(self._rotation, on_device, spans)
        shift.kv = self._rows
        return shift if shift.useful else None


class BufferedRows(HookedRows):
    """Rows in a buffer, or in pages that have no kernels of their own."""

    slice_rows: int | None = None

    def __init__(self, kv: RequestKV, packer: Packer, rotation: AnyRotation | None) -> None:
        super().__init__(kv, rotation)
        self._kv, self._packer = kv, packer

    def place(self, hit: Hit, data: KVData, share: float | None = None) -> None:
        self._packer.place(hit, data, self._kv, share)

    def finish(self) -> None:
        self._packer.finish(self._kv)

    def packing(self) -> Pack:
        return self._packer.packing(self._kv)

    def clear(self, rows: range) -> None:
        self._kv.clear(rows.start, rows.stop)  # they are masked, but NaN would still spread
