"""The course of a repair, for rows in our own KV and in vLLM's pages.

A repair is a generator. It yields what must run next, a probe or rows of the prompt, and is sent
the logits of the last rows that ran, if there are any. The caller decides when they run, and
what runs beside them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvboost.config import RepairParams
from kvboost.model.execution.segment import Hook
from kvboost.reuse.repair import STRATEGIES, MovedText, Probe
from kvboost.reuse.rounds import Rounds, asks_stale_answer
from kvboost.reuse.shift import Positions, Spans


@dataclass(frozen=True)
class Part:
    """Rows of the prompt at ``positions``, increasing and on the host, and a hook that shifts
    others."""

    positions: torch.Tensor
    hook: Hook | None


class ShiftedRows(Protocol):
    """The rows of a request."""

    def shift(self, positions: Positions, spans: Spans) -> Hook | None:
        """A hook for a repair of ``positions`` that shifts the other rows of ``spans``; None if
        there is nothing to shift."""


Given = torch.Tensor | None
"""The logits of what a repair has yielded last."""


def repair_rows(
    moved: MovedText,
    repair: RepairParams,
    rows: ShiftedRows,
    slice_rows: int,
    *,
    end: int | None = None,
    takes_rounds: bool = True,
    together: Sequence[tuple[int, int]] = (),
) -> Generator[Probe | Part, Given, tuple[Rounds, list[torch.Tensor]]]:
    """Chooses rows with the strategy of ``repair`` and computes them, together with those that are
    not known, before row ``end``, ``slice_rows`` at a time. Rows of an interval ``[start, end)`` of
    ``together`` are in one part. Returns what was chosen, and the logits of the last round's
    parts."""
    stale_answer = None
    all_layers = takes_rounds and asks_stale_answer(moved, repair)
    for probe in moved.probes(repair, through_all_layers=all_layers):
        logits = yield probe
        if logits is not None and len(logits):
            stale_answer = logits[-1]
    spans = moved.spans()
    choice = STRATEGIES[repair.strategy](moved, repair)
    rounds = Rounds(moved, choice, spans, repair, stale_answer)
    given = yield from _compute(rounds, rows, slice_rows, end, together)
    if rounds.may_go_on and rounds.goes_on(given[-1][0]):
        given = yield from _compute(rounds, rows, slice_rows, end, together)
    return rounds, given


def _compute(
    rounds: Rounds,
    rows: ShiftedRows,
    slice_rows: int,
    end: int | None,
    together: Sequence[tuple[int, int]],
) -> Generator[Part, Given, list[torch.Tensor]]:
    """Runs the rows of a round and shifts the others of its spans."""
    logits, since = [], 0
    # What a slice shifts depends on where it ends, so slices do not depend on the batch.
    positions = np.flatnonzero(rounds.rows[:end])
    stop = 0
    while (start := stop) < len(positions):
        stop = _stop(positions, start, start + slice_rows, together)
        part, hook = positions[start:stop], None
        if rounds.spans is not None:
            # A slice shifts the rows between the end of the last slice and its own, once.
            until = int(part[-1]) + 1
            hook = rows.shift(part, rounds.spans.between(since, until))
            since = until
        given = yield Part(torch.from_numpy(part), hook)
        if given is not None:
            logits.append(given)
    return logits


def _stop(positions: Positions, start: int, stop: int, together: Sequence[tuple[int, int]]) -> int:
    """Where a part from ``start`` on ends: at ``stop``, unless that is inside an interval of
    ``together``. Then it ends before the interval, or after it if that leaves nothing."""
    if stop >= len(positions):
        return len(positions)
    for first, last in together:
        if first < positions[stop] < last:
            before, after = np.searchsorted(positions, (first, last))
            return int(before if before > start else after)
    return stop
