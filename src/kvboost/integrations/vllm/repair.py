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
from kvboost.model.segment import Hook
from kvboost.reuse.paged.hooks import LayerHook
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.repair import STRATEGIES, MovedRows, asks_attention
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift, Spans

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
        probed = [0]

        def probe(
            positions: torch.Tensor, hook: Hook, until: int | None, absent: torch.Tensor | None
        ) -> None:
            """vLLM's attention knows no absent rows: they are computed with the probe instead."""
            assert isinstance(hook, AttentionMass)
            tail = rows = positions.cpu()
            if absent is not None:
                rows = torch.cat([absent.nonzero()[:, 0].cpu(), tail])
            self.run(ids, rows, table, self._probe_hook(hook, tail, table))
            if self._ranks.are_several:
                hook.wait()
                hook.mass = self._ranks.mean(hook.mass.to(pages.device)).to(hook.mass.device)
            probed[0] += len(rows)

        # Our kernels leave the choice to the host: a GPU would wait for its many small steps.
        device = pages.device if self._kernels is None else torch.device("cpu")
        moved = MovedRows(load, total, len(pages.caches), device, probe)
        if asks_attention(load.repair):
            moved.start_attention()
            yield WAITS  # a GPU probes while the host goes on with others
        spans, since = moved.spans().to("cpu"), 0
        choice = STRATEGIES[load.repair.strategy](moved, load.repair)
        yield probed[0]
        rows = (choice.rows | moved.unknown)[: load.end].nonzero()[:, 0].cpu()
        self.recomputed[load.request_id] = int(choice.rows[: load.end].sum())
        for part in torch.split(rows, slice_rows):
            hook = None
            if choice.shift:
                until = int(part[-1]) + 1
                hook = self._shift_hook(part, spans.between(since, until), table)
                since = until
            self.run(ids, part, table, hook)
            yield len(part)

    def run(
        self, ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, hook: LayerHook | None
    ) -> None:
        """One forward; ``ids`` are those of the whole prompt."""
        started = time.perf_counter()
        self._forward(ids[rows], rows, table, hook)
        if table.device.type == "cpu":
            seconds = time.perf_counter() - started
            self.measured.append((len(rows), int(rows[-1]) // 2, seconds))

    def _probe_hook(
        self, mass: AttentionMass, rows: torch.Tensor, table: torch.Tensor
    ) -> LayerHook:
        if self._kernels is not None:
            return self._kernels.probe(mass, rows, table)
        pages = self._pages
        slots = pages.slots(table, torch.arange(int(rows[-1]) + 1, device=pages.device))
        return paged.ProbeHook(mass, paged.PagedRows(pages, slots), len(rows))

    def _shift_hook(
        self, part: torch.Tensor, spans: Spans, table: torch.Tensor
    ) -> LayerHook | None:
        """Shifts the moved rows of ``spans``; None if there is nothing to shift."""
        if self._kernels is not None:
            return self._kernels.shift(part, spans, table)
        pages = self._pages
        shift = Shift(self._rotation, part.to(pages.device), spans.to(pages.device))
        if not shift.useful:
            return None
        slots = pages.slots(table, torch.arange(shift.touched.stop, device=pages.device))
        return paged.ShiftHook(shift, paged.PagedRows(pages, slots))
