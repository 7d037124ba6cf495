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

from kvboost.integrations.vllm.paged import OfLastRows, PageRows
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.planner import Load
from kvboost.integrations.vllm.ranks import Ranks
from kvboost.model.execution.segment import Hook
from kvboost.reuse.driver import RepairedRows, repair_rows
from kvboost.reuse.probe import Probe
from kvboost.reuse.repair import MovedText, RepairStep
from kvboost.reuse.request import HookedRows
from kvboost.reuse.rope import Rotation

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
        total = len(load.token_ids)
        ids = torch.from_numpy(load.token_ids.astype(np.int64))
        moved = MovedText(load.plan, total, len(self._pages.caches))
        rows = self._rows(table, total)
        steps = repair_rows(moved, load.repair, rows, slice_rows, end=load.end)
        while True:
            try:
                some = next(steps)
            except StopIteration as end:
                chosen, _ = end.value
                break
            if some.probe is not None:
                num_rows = self._probe(some, some.probe, ids, rows, table)
                yield WAITS  # a GPU probes while the host goes on with others
                yield num_rows
            else:
                self.run(ids, some.positions, table, some.shift)
                yield len(some.positions)
        self.recomputed[load.request_id] = int(chosen[: load.end].sum())

    def _rows(self, table: torch.Tensor, num_rows: int) -> RepairedRows:
        if self._kernels is not None:
            return self._kernels.rows_of(table)
        return HookedRows(PageRows(self._pages, table, num_rows), self._rotation)

    def _probe(
        self,
        step: RepairStep,
        probe: Probe,
        ids: torch.Tensor,
        request: RepairedRows,
        table: torch.Tensor,
    ) -> int:
        """Runs a probe; returns its rows. vLLM's own attention knows no absent rows: without
        kernels they are computed with the probe."""
        tail = rows = step.positions
        absent, hook = step.absent, request.probe(probe, tail)
        if absent is not None and self._kernels is None:
            rows, absent = torch.cat([absent.nonzero()[:, 0], tail]), None
            hook = OfLastRows(hook, len(tail))
        self.run(ids, rows, table, hook, absent, step.until)
        if self._ranks.are_several:
            with torch.inference_mode():
                seen = probe.observed()
                seen.copy_(self._ranks.mean(seen.to(self._pages.device)))
        return len(rows)

    def run(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        hook: Hook | None,
        absent: torch.Tensor | None = None,
        until: int | None = None,
    ) -> None:
        """One forward; ``ids`` are those of the whole prompt."""
        started = time.perf_counter()
        self._forward(ids[rows], rows, table, hook, absent, until)
        if not self._pages.on_gpu:
            seconds = time.perf_counter() - started
            self.measured.append((len(rows), int(rows[-1]) // 2, seconds))
