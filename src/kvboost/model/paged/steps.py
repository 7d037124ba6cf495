"""Decode steps: one row of each of several requests, through buffers that stay where they are.

The last token and the length of every running request are on the device, in its row of the slab's
table. A step reads them, and writes the next token and length there: nothing goes through the host
but the rows that take part, and these only when they change. So a step can be a CUDA graph, and the
next step can start before the host has seen the tokens of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch

from kvboost.model.adapters.adapter import AppliedAdapter
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.sampling import Picked
from kvboost.model.execution.segment import Segment
from kvboost.model.paged.adapter_slots import NO_ADAPTER, AdapterSlots
from kvboost.model.paged.draft_steps import DraftSteps, Launched
from kvboost.model.paged.graphs import Capture
from kvboost.model.paged.sampling import GREEDY, DeviceSampling, Kind
from kvboost.model.paged.slab import SCRATCH, Slab
from kvboost.model.paged.step_batch import Beside, RunModel, StepGraphs, batch_of
from kvboost.model.triton.host import HostCopy, to_device

StepResult = torch.Tensor | Picked | list[Picked]


def bucket_of(count: int) -> int:
    """The number of rows that a step of ``count`` requests is padded to."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 32 else 16 if count <= 64 else 32 if count <= 128 else 64
    return -(-count // step) * step


class _Bucket(StepGraphs):
    """Steps of one number of rows, with or without rows ``beside`` them and adapters."""

    def __init__(
        self, size: int, steps: Steps, beside: Beside | None = None, *, adapted: bool = False
    ) -> None:
        name = "the model" if beside is None else "steps that heal"
        name = f"{name} with adapters" if adapted else name
        super().__init__(steps, name, batch_of(steps.slab, size, beside), adapted=adapted)
        self.size = size
        self._steps = steps
        self._requests = [SCRATCH] * size
        self.rows = torch.zeros(size, dtype=torch.int64, device=steps.slab.shape.device)
        self.positions = torch.zeros_like(self.rows)
        self.ids = torch.zeros_like(self.rows)
        self.picked = torch.zeros_like(self.rows)

    def run(self, requests: Sequence[int], kind: Kind) -> torch.Tensor:
        """The next tokens of the requests with these rows, int64 ``[size]``: the same tensor in
        every step."""
        padded = [*requests, *[SCRATCH] * (self.size - len(requests))]
        if padded != self._requests:
            self._requests = padded
            self.rows.copy_(to_device(padded, torch.int64, self.rows.device))
        return self.replay(kind)

    def _forward(self) -> torch.Tensor:
        steps, batch = self._steps, self.batch
        self.positions.copy_(steps.lengths[self.rows])
        self.ids.copy_(steps.tokens[self.rows])
        adapters = None if batch.adapters is None else steps.adapters[self.rows]
        batch.load(self.rows, self.positions, adapters)
        ids, positions, wanted = batch.inputs(self.ids, self.positions)
        return steps.run_model(ids, positions, batch, wanted)

    def _sample(self, kind: Kind) -> torch.Tensor:
        steps, after = self._steps, self.positions + 1
        token = steps.sampling.pick(self.logits, self.rows, after, self.ids, kind)
        self.picked.copy_(token)
        steps.tokens.index_copy_(0, self.rows, self.picked)
        steps.lengths.index_copy_(0, self.rows, after * (self.rows > SCRATCH))
        return self.picked


class _Row(NamedTuple):
    """A row of a request that takes part in a step: the one that a segment asks for, or the one
    after it, whose token the device has."""

    segment: Segment
    number: int
    """Of its request in the slab's table."""
    serial: int
    position: int
    beside: Segment | None
    """The rows that are computed with it."""

    @classmethod
    def of(cls, segment: Segment) -> _Row:
        holding = segment.kv.holding
        return cls(segment, holding.row, holding.serial, segment.first, segment.beside)

    def after(self) -> _Row:
        segment, number, serial, position, _ = self
        return _Row(segment, number, serial, position + 1, segment.beside_ahead)


class _Pending(NamedTuple):
    """The result of a row that has been launched."""

    serial: int
    position: int
    tokens: HostCopy
    at: int
    logits: torch.Tensor | None
    beside: Segment | None

    def get(self) -> torch.Tensor | Picked:
        return (self.tokens.numbers[self.at], None) if self.logits is None else self.logits


class Steps:
    """Runs decode steps of the requests in one slab. One thread at a time may call it."""

    def __init__(
        self,
        slab: Slab,
        run_model: RunModel,
        num_logits: int,
        capture: Capture,
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        """``adapter_slots``: what gives the model's layers the weights of adapters."""
        self.slab = slab
        self.run_model = run_model
        self.capture = capture
        device = slab.shape.device
        num_rows = slab.num_requests + 1
        self.sampling = DeviceSampling(num_rows, num_logits, device)
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.adapters = torch.full_like(self.tokens, NO_ADAPTER)
        """By row: the slot of its adapter."""
        self.adapter_slots = adapter_slots
        if adapter_slots is not None:
            adapter_slots.on_changed = self._forget_adapted
            adapter_slots.on_replaced = self._next_is_unknown
        self.beside: Beside | None = None
        """Runs rows beside those of a step."""
        self.runs_ahead = True
        """Whether the next step starts before it is known whether its requests have ended."""
        self.drafts = DraftSteps(self)
        """Runs the steps in which requests have several rows."""
        self.num_steps = self.num_ahead = self.num_rows_beside = 0
        self.buckets: dict[tuple[int, bool, bool], _Bucket] = {}
        self._next: dict[int, tuple[int, int]] = {}
        """By row: the serial of its request, and the position whose token the device has."""
        self._pending: dict[int, _Pending] = {}

    @property
    def beside_rows(self) -> int:
        """The number of a request's rows that can run beside its next one, in little more time."""
        return self.beside.most_rows if self.beside is not None else 0

    def record(self, size: int, *, with_beside: bool = False) -> None:
        """Records greedy steps of ``size`` rows before a request needs one. It runs padding, so no
        request may have had rows beside a step."""
        self._bucket(size, with_beside=with_beside).run([], GREEDY)

    def forget_graphs(self) -> None:
        """Records all steps anew: the model has changed."""
        self.buckets.clear()
        self.drafts.forget_graphs()

    def _forget_adapted(self) -> None:
        """Records the steps with adapters anew."""
        self.buckets = {key: bucket for key, bucket in self.buckets.items() if not key[2]}
        self.drafts.forget_adapted()

    def _next_is_unknown(self) -> None:
        """Slots have got other adapters, so the device must be told those of all requests."""
        self._next.clear()

    def takes(self, segment: Segment) -> bool:
        """Whether a segment is the next row of a request with pages of this slab, or several."""
        kv = segment.kv
        if kv.slab is not self.slab or not segment.is_plain or segment.places is not None:
            return False
        if segment.hook is not None or segment.until is not None:
            return False
        if kv.adapter is not None and not self._takes_adapter(segment, kv.adapter):
            return False
        if len(segment) > 1:
            return self.runs_ahead and self.drafts.takes(segment)
        beside = segment.beside
        return segment.num_logits == 1 and (beside is None or self._takes_beside(beside, kv))

    def _takes_adapter(self, segment: Segment, applied: AppliedAdapter) -> bool:
        slots = self.adapter_slots
        return slots is not None and segment.first >= applied.start and slots.takes(applied.adapter)

    def _takes_beside(self, rows: Segment, kv: RequestKV) -> bool:
        """Whether ``rows`` can run beside a step of the request with ``kv``: its own rows."""
        is_own = rows.kv is kv and kv.adapter is None
        return is_own and self.beside is not None and self.beside.takes(rows)

    def run(self, segments: Sequence[Segment]) -> list[StepResult | None]:
        """The next token of each segment that has a sampler, the tokens after each of its rows if
        it has several; logits ``[num_logits, vocab]`` of the others. Launches the steps after
        these, if ``ahead`` says that they will be asked for; then the results of an earlier call
        may already be on their way. A segment that joins such requests runs in the step after
        theirs: it has no result yet, and the next call with it has. While a request has a draft,
        no step is launched ahead: it would not have the rows of the next one. At most one segment
        may have rows beside it."""
        rows = [_Row.of(segment) for segment in segments]
        ready: list[_Pending | Launched | None] = [self._claim(row) for row in rows]
        has_drafts = any(len(segment) > 1 for segment in segments)
        missing = [index for index, found in enumerate(ready) if found is None]
        drafted = [index for index in missing if has_drafts and self.drafts.takes(segments[index])]
        plain = [index for index in missing if index not in drafted]
        goes_on = [not has_drafts and self._looks_ahead(segment) for segment in segments]
        joining: list[int] = []
        if any(goes_on) and len(missing) < len(segments):
            joining = [index for index in plain if _may_join(segments[index])]
            plain = [index for index in plain if index not in joining]
        launched: list[_Pending | Launched] = []
        if plain:
            launched += self._launch([rows[index] for index in plain])
        if drafted:
            launched += self._launch_drafts([segments[index] for index in drafted])
        for index, result in zip([*plain, *drafted], launched, strict=True):
            ready[index] = result
        if any(goes_on):
            ahead = (index for index, wanted in enumerate(goes_on) if wanted)
            following = [rows[index].after() for index in ahead if index not in joining]
            following += [rows[index] for index in joining]
            self.num_ahead += 1
            for row, pending in zip(following, self._launch(following), strict=True):
                self._pending[row.number] = pending
        return [None if found is None else found.get() for found in ready]

    def _launch_drafts(self, segments: Sequence[Segment]) -> list[Launched]:
        for segment in segments:
            self._next.pop(segment.kv.holding.row, None)  # the host says which token follows
        adapted = self._place_adapters(segments)
        return self.drafts.run(segments, adapted=adapted)

    def _claim(self, row: _Row) -> _Pending | None:
        """The result of a row that an earlier call has launched. It is a token: a segment that
        asks for logits, or has other rows beside it, runs again."""
        found = self._pending.pop(row.number, None)
        if found is None or row.segment.sampler is None or len(row.segment) > 1:
            return None
        if row.beside is not None and _rows(row.beside) != _rows(found.beside):
            return None
        is_same = found.serial == row.serial and found.position == row.position
        return found if is_same else None

    def _looks_ahead(self, segment: Segment) -> bool:
        rows = segment.beside_ahead
        wanted = self.runs_ahead and segment.ahead
        wanted = wanted and (rows is None or self._takes_beside(rows, segment.kv))
        return wanted and segment.sampler is not None and segment.end < segment.kv.capacity

    def _launch(self, rows: Sequence[_Row]) -> list[_Pending]:
        """Starts a step of these rows."""
        adapted = self._place_adapters([row.segment for row in rows])
        self._upload(rows)
        beside = next((row.beside for row in rows if row.beside is not None), None)
        size = bucket_of(len(rows))
        bucket = self._bucket(size, with_beside=beside is not None, adapted=adapted)
        if beside is not None and self.beside is not None:
            self.beside.load(beside, rows[0].position if bucket.batch.joins else None)
            self.num_rows_beside += len(beside)
        samplers = (row.segment.sampler for row in rows)
        kinds = {sampler.kind for sampler in samplers if sampler is not None}
        picked = bucket.run([row.number for row in rows], reduce(or_, kinds, GREEDY))
        tokens = HostCopy(picked, sleeps=True)  # the GPU mostly has the next step already
        self.num_steps += 1
        launched = []
        for at, row in enumerate(rows):
            logits = None
            if row.segment.sampler is None:
                logits = bucket.logits[at : at + 1].clone()
                self._next.pop(row.number, None)  # another token than this one will follow
            else:
                self._next[row.number] = (row.serial, row.position + 1)
            launched.append(_Pending(row.serial, row.position, tokens, at, logits, row.beside))
        return launched

    def _bucket(self, size: int, *, with_beside: bool = False, adapted: bool = False) -> _Bucket:
        key = size, with_beside, adapted
        if key not in self.buckets:
            beside = self.beside if with_beside else None
            self.buckets[key] = _Bucket(size, self, beside, adapted=adapted)
        return self.buckets[key]

    def _place_adapters(self, segments: Sequence[Segment]) -> bool:
        """Makes the adapters of these segments ready; whether there are any."""
        applied = (segment.kv.adapter for segment in segments)
        wanted = [each.adapter for each in applied if each is not None]
        if wanted and self.adapter_slots is not None:
            self.adapter_slots.place(wanted)
        return bool(wanted)

    def slot_of(self, segment: Segment) -> int:
        """Where the adapter of a segment is, once it has been placed."""
        applied = segment.kv.adapter
        if applied is None or self.adapter_slots is None:
            return NO_ADAPTER
        return self.adapter_slots.slot_of(applied.adapter)

    def _upload(self, rows: Sequence[_Row]) -> None:
        """Tells the device the tokens and positions that it does not have."""
        known = self._next
        unknown = [row for row in rows if known.get(row.number) != (row.serial, row.position)]
        if unknown:
            numbers = [row.number for row in unknown]
            ids = [int(row.segment.token_ids[0]) for row in unknown]
            positions = [row.position for row in unknown]
            slots = [self.slot_of(row.segment) for row in unknown]
            sent = to_device([*numbers, *ids, *positions, *slots], torch.int64, self.tokens.device)
            at, ids_there, positions_there, slots_there = sent.view(4, -1)
            self.adapters.index_copy_(0, at, slots_there)
            self.tokens.index_copy_(0, at, ids_there)
            self.lengths.index_copy_(0, at, positions_there)


def _may_join(segment: Segment) -> bool:
    """Whether its result may come with a later call: a token, with no rows beside it."""
    return segment.sampler is not None and segment.beside is None


def _rows(beside: Segment | None) -> tuple[int, int]:
    """Where they begin and end."""
    return (0, 0) if beside is None else (beside.first, beside.end)
