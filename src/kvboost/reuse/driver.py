"""The course of a repair, for rows in our own KV and in vLLM's pages.

A repair is a generator. It yields what must run next, a probe or rows of the prompt, and is sent
the logits of the last rows that ran, if there are any. The caller decides when they run, and
what runs beside them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
import torch

from kvboost.config import RepairParams
from kvboost.model.execution.segment import Hook
from kvboost.reuse.probe import Probe
from kvboost.reuse.repair import STRATEGIES, MovedText, RepairStep
from kvboost.reuse.shift import Positions, Spans, Which


class RepairedRows(Protocol):
    """The rows of a request, wherever they are: in a buffer, in our pages or in vLLM's."""

    def shift(self, positions: Positions, spans: Spans) -> Hook | None:
        """A hook for a repair of ``positions`` that shifts the other rows of ``spans``; None if
        there is nothing to shift."""

    def probe(self, probe: Probe, positions: torch.Tensor) -> Hook:
        """The hook that observes here what ``probe`` asks for, of the rows at ``positions``."""


Given = torch.Tensor | None
"""The logits of what a repair has yielded last."""


def repair_rows(
    moved: MovedText,
    repair: RepairParams,
    rows: RepairedRows | None,
    slice_rows: int,
    *,
    end: int | None = None,
    together: Sequence[tuple[int, int]] = (),
) -> Generator[RepairStep, Given, tuple[Which, list[torch.Tensor]]]:
    """Chooses rows with the strategy of ``repair`` and computes them, together with those that are
    not known, before row ``end``, ``slice_rows`` at a time. Rows of an interval ``[start, end)`` of
    ``together`` are in one step. Others are shifted if there are ``rows``. Returns which moved rows
    were chosen, and the logits of the steps."""
    for probe in moved.probes(repair):  # noqa: UP028 - a list cannot be sent logits
        yield probe
    spans = moved.spans()
    choice = STRATEGIES[repair.strategy](moved, repair)
    moved.charge(choice.rows)
    logits, since = [], 0
    # What a slice shifts depends on where it ends, so slices do not depend on the batch.
    positions = np.flatnonzero((choice.rows | moved.unknown)[:end])
    stop = 0
    while (start := stop) < len(positions):
        stop = step_end(positions, start, start + slice_rows, together)
        part, hook = positions[start:stop], None
        if choice.shift and rows is not None:
            # A slice shifts the rows between the end of the last slice and its own, once.
            until = int(part[-1]) + 1
            hook = rows.shift(part, spans.between(since, until))
            since = until
        given = yield RepairStep(torch.from_numpy(part), hook)
        if given is not None:
            logits.append(given)
    return choice.rows, logits


def step_end(
    positions: Positions, start: int, stop: int, together: Sequence[tuple[int, int]]
) -> int:
    """Where a step from ``start`` on ends: at ``stop``, unless that is inside an interval of
    ``together``. Then it ends before the interval, or after it if that leaves nothing."""
    if stop >= len(positions):
        return len(positions)
    for first, last in together:
        if first < positions[stop] < last:
            before, after = np.searchsorted(positions, (first, last))
            return int(before if before > start else after)
    return stop
