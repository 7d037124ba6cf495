"""Decode steps of several rows of a request: its next row, and those of tokens that may follow.

Their tokens and positions come from the host, which has drafted them. Every row has a tile of its
own in attention and sees the rows before it, those of this step among them. The steps are padded to
a few sizes, each of which becomes a CUDA graph when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvboost.model.execution.sampling import Picked
from kvboost.model.execution.segment import Segment
from kvboost.model.paged.adapter_slots import NO_ADAPTER
from kvboost.model.paged.sampling import GREEDY, Kind
from kvboost.model.paged.slab import SCRATCH
from kvboost.model.paged.step_batch import StepBatch, StepGraphs
from kvboost.model.triton.host import HostCopy, send_into

if TYPE_CHECKING:
    from kvboost.model.paged.steps import Steps

SIZES = (8, 16, 32, 64, 96, 128)
"""Numbers of rows that steps are padded to."""


def counted_rows(rows: int) -> int:
    """The number of rows that a step with drafts counts as where times are learned: one more than
    it is padded to, which no step without drafts has."""
    return next((size for size in SIZES if size >= rows), SIZES[-1]) + 1


class _Bucket(StepGraphs):
    """Steps of one number of rows."""

    suffix = " with drafts"

    def __init__(self, size: int, tables: Steps, *, adapted: bool) -> None:
        name = f"steps with drafts{' and adapters' if adapted else ''}"
        super().__init__(tables, name, StepBatch(tables.slab, size), adapted=adapted)
        self._given = torch.zeros(4, size, dtype=torch.int64, device=tables.slab.shape.device)

    def run(self, given: torch.Tensor, kind: Kind) -> torch.Tensor:
        """The tokens after the rows ``given``, int64 ``[4, rows]``: those of the requests in the
        slab's table, token ids, positions and slots of adapters. The result is the same tensor in
        every step."""
        padded = torch.zeros(self._given.shape, dtype=torch.int64)
        padded[0], padded[3] = SCRATCH, NO_ADAPTER
        padded[:, : given.shape[1]] = given
        send_into(padded, self._given)
        return self.replay(kind)

    def _forward(self) -> torch.Tensor:
        rows, ids, positions, slots = self._given
        self.batch.load(rows, positions, slots)
        return self._tables.run_model(ids, positions, self.batch)

    def _sample(self, kind: Kind) -> torch.Tensor:
        rows, ids, positions, _ = self._given
        return self._tables.sampling.pick(self.logits, rows, positions + 1, ids, kind)


@dataclass(frozen=True)
class Launched:
    """The result of a segment that has been launched."""

    segment: Segment
    tokens: HostCopy
    first: int
    """The first of the rows that it asks for, among those of the step."""
    logits: torch.Tensor | None

    def get(self) -> torch.Tensor | Picked | list[Picked]:
        if self.logits is not None:
            return self.logits
        tokens = self.tokens.numbers[self.first : self.first + self.segment.num_logits]
        picked: list[Picked] = [(token, None) for token in tokens]
        return picked if len(self.segment) > 1 else picked[0]


class DraftSteps:
    """Runs steps in which requests have drafts. One thread at a time may call it."""

    def __init__(self, tables: Steps) -> None:
        self._tables = tables
        self._buckets: dict[tuple[int, bool], _Bucket] = {}
        self.num_steps = 0

    def takes(self, segment: Segment) -> bool:
        """Whether it runs the rows of a request, which has pages of this slab. A penalty for tokens
        that were seen would take those of a draft for seen."""
        penalizes = segment.sampler is not None and segment.sampler.kind.penalizes
        return (
            len(segment) <= SIZES[-1]
            and segment.decodes
            and segment.beside is None
            and not penalizes
        )

    def run(self, segments: Sequence[Segment], *, adapted: bool = False) -> list[Launched]:
        """Starts steps of these segments, one if they are not many. ``adapted``: some have
        adapters, which have slots."""
        parts = _at_most(segments, SIZES[-1])
        return [result for some in parts for result in self._launch(some, adapted)]

    def record(self, size: int) -> None:
        """Records greedy steps of ``size`` rows before a request needs one. It runs padding."""
        self._bucket(size, adapted=False).run(torch.zeros(4, 0, dtype=torch.int64), GREEDY)

    def forget_graphs(self) -> None:
        self._buckets.clear()

    def forget_adapted(self) -> None:
        """Records the steps with adapters anew."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if not key[1]}

    def _launch(self, segments: Sequence[Segment], adapted: bool) -> list[Launched]:
        rows: list[int] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        kind = GREEDY
        for segment in segments:
            rows += [segment.kv.holding.row] * len(segment)
            ids += segment.token_ids.tolist()
            positions += segment.positions
            slots += [self._tables.slot_of(segment)] * len(segment)
            kind = kind | segment.sampler.kind if segment.sampler is not None else kind
        bucket = self._bucket(len(rows), adapted=adapted)
        tokens = HostCopy(bucket.run(torch.tensor([rows, ids, positions, slots]), kind))
        self.num_steps += 1
        launched, end = [], 0
        for segment in segments:
            end += len(segment)
            first = end - segment.num_logits
            logits = bucket.logits[first:end].clone() if segment.sampler is None else None
            launched.append(Launched(segment, tokens, first, logits))
        return launched

    def _bucket(self, rows: int, *, adapted: bool) -> _Bucket:
        key = next(size for size in SIZES if size >= rows), adapted
        if key not in self._buckets:
            self._buckets[key] = _Bucket(key[0], self._tables, adapted=adapted)
        return self._buckets[key]


def _at_most(segments: Sequence[Segment], rows: int) -> Iterator[list[Segment]]:
    """The segments in parts of at most so many rows."""
    part: list[Segment] = []
    for segment in segments:
        if part and sum(map(len, part)) + len(segment) > rows:
            yield part
            part = []
        part.append(segment)
    if part:
        yield part
