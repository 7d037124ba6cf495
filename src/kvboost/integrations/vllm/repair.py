"""Computes rows of loads over vLLM's pages: moved ones that a strategy chooses, and those that are
not known.

A load is a generator that yields whenever it has computed some rows or waits for data, so that
other requests' steps come in between.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvboost.integrations.vllm import paged
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.planner import Load
from kvboost.integrations.vllm.ranks import Ranks
from kvboost.model.execution.segment import Hook as LayerHook
from kvboost.reuse.driver import repair_rows
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.repair import MovedText, RepairStep
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Positions, Shift, Spans

if TYPE_CHECKING:
    from kvboost.integrations.vllm.sparse import SparseForward
    from kvboost.reuse.paged.kernels import GpuKernels

SCRATCH_PAGE = 0
"""The last rows of a prompt, for which vLLM has allocated no page yet, are probed in this one.
vLLM keeps it as a placeholder that nothing attends to."""

Loading = Generator[int, None, None]
"""Yields the rows it has computed, or ``WAITS``."""
WAITS = 0


class Repairer:
    """``kernels`` choose and shift if they are given; torch does otherwise."""

    def __init__(
        self,
        pages: Pages,
        forward: SparseForward,
        rotation: Rotation,
        kernels: GpuKernels | None,
        ranks: Ranks,
    ) -> None:
        self._pages = pages
        self._forward = forward
        self._rotation = rotation
        self._kernels = kernels
        self._ranks = ranks
        self.recomputed: dict[str, int] = {}
        """Moved rows that were computed again, by request."""
        self.measured: list[tuple[int, int, float]] = []
        """Forwards that were timed: rows, keys, seconds."""

    def repair(self, load: Load, table: torch.Tensor, slice_rows: int) -> Loading:
        """Chooses moved rows with the strategy of the request and computes them, together with the
        rows that are not known, ``slice_rows`` at a time. ``table`` has the pages of the request,
        and ``SCRATCH_PAGE``."""
        pages, total = self._pages, len(load.token_ids)
        ids = torch.from_numpy(load.token_ids.astype(np.int64))
        moved = MovedText(load, total, len(pages.caches))
        shifted = _ShiftedLoad(pages, self._rotation, self._kernels, table)
        steps = repair_rows(moved, load.repair, shifted, slice_rows, end=load.end)
        while True:
            try:
                some = next(steps)
            except StopIteration as end:
                chosen, _ = end.value
                break
            if some.is_probe:
                num_rows = self._probe(some, ids, table)
                yield WAITS  # a GPU probes while the host goes on with others
                yield num_rows
            else:
                self.run(ids, some.positions, table, some.hook)
                yield len(some.positions)
        self.recomputed[load.request_id] = int(chosen[: load.end].sum())

    def _probe(self, probe: RepairStep, ids: torch.Tensor, table: torch.Tensor) -> int:
        """Runs a probe; returns its rows. vLLM's own attention knows no absent rows: without
        kernels they are computed with the probe."""
        hook = probe.hook
        assert isinstance(hook, AttentionMass)
        tail = rows = probe.positions
        absent = probe.absent
        if absent is not None and self._kernels is None:
            rows, absent = torch.cat([absent.nonzero()[:, 0], tail]), None
        self.run(ids, rows, table, self._probe_hook(hook, tail, table), absent)
        if self._ranks.are_several:
            hook.wait()
            on_device = hook.mass.to(self._pages.device)
            hook.mass = self._ranks.mean(on_device).to(hook.mass.device)
        return len(rows)

    def run(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        hook: LayerHook | None,
        absent: torch.Tensor | None = None,
    ) -> None:
        """One forward; ``ids`` are those of the whole prompt."""
        started = time.perf_counter()
        self._forward(ids[rows], rows, table, hook, absent)
        if not self._pages.on_gpu:
            seconds = time.perf_counter() - started
            self.measured.append((len(rows), int(rows[-1]) // 2, seconds))

    def _probe_hook(
        self, mass: AttentionMass, rows: torch.Tensor, table: torch.Tensor
    ) -> LayerHook:
        if self._kernels is not None:
            return self._kernels.probe(mass, rows, table)
        pages = self._pages
        slots = pages.slots(table, torch.arange(int(rows[-1]) + 1, device=pages.device))
        return paged.GatheredMass(mass, paged.GatheredRows(pages, slots), len(rows))


class _ShiftedLoad:
    """The rows of a load, whose pages are ``table``."""

    def __init__(
        self, pages: Pages, rotation: Rotation, kernels: GpuKernels | None, table: torch.Tensor
    ) -> None:
        self._pages, self._rotation, self._kernels, self._table = pages, rotation, kernels, table

    def shift(self, positions: Positions, spans: Spans) -> LayerHook | None:
        if self._kernels is not None:
            return self._kernels.shift(positions, spans, self._table)
        pages = self._pages
        shift = Shift(self._rotation, torch.from_numpy(positions).to(pages.device), spans)
        if not shift.useful:
            return None
        slots = pages.slots(self._table, torch.arange(shift.touched.stop, device=pages.device))
        return paged.GatheredShift(shift, paged.GatheredRows(pages, slots))
