"""The rows of a decode step, in buffers that stay where they are, and what steps share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvboost.model.execution.attention import Batch
from kvboost.model.execution.segment import Rules, Segment
from kvboost.model.paged.adapter_slots import NO_ADAPTER
from kvboost.model.paged.batch import Fresh, RowBatch
from kvboost.model.paged.graphs import Function
from kvboost.model.paged.sampling import Kind
from kvboost.model.paged.slab import PAGE, Slab
from kvboost.model.triton.attention import attend
from kvboost.model.triton.host import aside, side_stream
from kvboost.model.triton.pages import check_pages
from kvboost.model.triton.rows import MOST_PARTS, Tile, TiledRows, programs_at_once

if TYPE_CHECKING:
    from kvboost.model.paged.steps import Steps

StepInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Token ids and positions of rows, and which of them logits are wanted of; None: of all."""


class RunModel(Protocol):
    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs token ids at positions, both int64 ``[rows]``; returns logits ``[rows, vocab]``, or
        those of the ``wanted`` rows."""


class Beside(Protocol):
    """Consecutive rows of one request that a step computes beside its own, through buffers of a
    fixed size."""

    @property
    def most_rows(self) -> int: ...

    @property
    def num_rows(self) -> int:
        """Of the buffers: one more than it takes."""

    @property
    def last(self) -> torch.Tensor:
        """Where the last row is in the buffers, int64 ``[1]``."""

    def takes(self, segment: Segment) -> bool: ...

    def load(self, segment: Segment, own: int | None = None) -> None:
        """Fills the buffers, before a step. With ``own``, the position of the only row of the step,
        which is of the same request, that row is the last one."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots, all int64 ``[num_rows]``. The id of the step's own row is
        not known here."""

    def attend(self, layer: int, query: torch.Tensor, rules: Rules, out: torch.Tensor) -> object:
        """Attention of ``query``, ``[num_rows, heads, dim]``, into ``out``."""


class StepGraphs:
    """Steps of one size: the model and sampling, each captured when it is first needed."""

    suffix = ""
    """Of the names under which sampling is captured."""

    def __init__(self, tables: Steps, name: str, batch: StepBatch, *, adapted: bool) -> None:
        self._tables, self._name, self.batch = tables, name, batch
        if adapted:
            batch.adapters = torch.full_like(batch.slots, NO_ADAPTER)
        self.logits = torch.empty(0)
        self._run: Function | None = None
        self._samplers: dict[Kind, Function] = {}

    def replay(self, kind: Kind) -> torch.Tensor:
        """Runs a step; returns the tokens: the same tensor in every step. Sampling reads logits
        where those of the first step were: it may be a graph even if the model, whose logits are
        elsewhere in every step then, is none."""
        if self._run is None:
            self._run = self._tables.capture(self._forward, self._name)
        logits = self._run()
        if not len(self.logits):
            self.logits = logits
        elif logits is not self.logits:
            self.logits.copy_(logits)
        if kind not in self._samplers:
            name = f"sampling ({kind}){self.suffix}"
            self._samplers[kind] = self._tables.capture(lambda: self._sample(kind), name)
        return self._samplers[kind]()

    def _forward(self) -> torch.Tensor:
        raise NotImplementedError

    def _sample(self, kind: Kind) -> torch.Tensor:
        """Gives the same result if it is called again: a capture runs it more than once."""
        raise NotImplementedError


class StepBatch(RowBatch):
    """Rows of different requests, each after all rows of its request, and those ``beside`` them.
    ``load`` and ``inputs`` are called before every step."""

    joins = False
    """Whether its only row is the last of those beside it."""

    def __init__(self, slab: Slab, size: int, beside: Beside | None = None) -> None:
        super().__init__(slab)
        device = slab.shape.device
        self._beside = beside
        more = beside.num_rows if beside is not None else 0
        self._stream = None if beside is None else side_stream(device)
        self.slots = torch.zeros(size + more, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int32, device=device)
        self.requests = torch.zeros(size, dtype=torch.int32, device=device)
        self._rows: dict[int, TiledRows] = {}

    def load(
        self, rows: torch.Tensor, positions: torch.Tensor, adapters: torch.Tensor | None
    ) -> None:
        """Sets the rows of the requests in the slab's table, their ``positions``, and the slots of
        their adapters."""
        self.positions.copy_(positions)
        self.requests.copy_(rows)
        for known in self._rows.values():
            self._fill_requests(known)
        page = self._slab.table[rows, positions // PAGE].long()
        torch.add(positions % PAGE, page, alpha=PAGE, out=self.slots[: len(rows)])
        if self.adapters is not None and adapters is not None:
            self.adapters[: len(rows)].copy_(adapters)

    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> StepInputs:
        """The inputs of the model, given the token ids and positions of the requests' own rows."""
        if self._beside is None:
            return ids, positions, None
        more, more_positions, slots = self._beside.inputs()
        self.slots[len(ids) :].copy_(slots)
        own = torch.arange(len(ids), device=ids.device)
        return torch.cat([ids, more]), torch.cat([positions, more_positions]), own

    def attend_rows(
        self, layer: int, query: torch.Tensor, rules: Rules, *, fresh: Fresh | None = None
    ) -> torch.Tensor:
        own = 0 if self.joins else len(self.positions)
        rows = self._rows_for(query.shape[1]) if own else None
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        with aside(self._stream):
            if self._beside is not None:
                self._beside.attend(layer, query[own:], rules, out[own:])
        if rows is not None:
            attend(query[:own], self.pages(layer), rows, *rules, out=out[:own])
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return out

    def _rows_for(self, heads: int) -> TiledRows:
        """The rows for the kernel: of each one tile, or several if many heads share a KV head. They
        are split over their keys as far as the device has programs to spare: lengths are not known
        when a graph is recorded."""
        if heads not in self._rows:
            shape, size = self._slab.shape, len(self.positions)
            group = heads // shape.num_kv_heads
            tile = Tile.pick(group, shape.dtype, check_pages(self.pages(0))[2])
            own = torch.arange(0, group, tile.rows, dtype=torch.int32, device=shape.device)
            number = torch.arange(size * len(own), dtype=torch.int32, device=shape.device)
            spare = programs_at_once(shape.device, tile) // (len(number) * shape.num_kv_heads)
            parts = max(1, min(spare, MOST_PARTS))
            zero, one = torch.zeros_like(number), torch.ones_like(number)
            at = own.repeat(size)
            start = number // len(own) * group + at
            room = (group - at).clamp(max=tile.rows)
            tiles = torch.stack([start, room, number * parts, one * parts], 1)
            items = torch.stack([zero, start, room, room, zero, one * parts, zero], 1)
            items = items.repeat_interleave(parts, 0)
            slot = torch.arange(len(items), dtype=torch.int32, device=shape.device)
            items[:, 4], items[:, 6] = slot % parts, slot
            slots = len(items) if parts > 1 else 0
            found = TiledRows(
                self.positions,
                items,
                tiles,
                self._slab.table,
                tile,
                parts,
                slots,
                self._slab.most_rows,
                group,
            )
            self._fill_requests(found)
            self._rows[heads] = found
        return self._rows[heads]

    def _fill_requests(self, rows: TiledRows) -> None:
        """Sets the requests of the items of ``rows``: each of ours has as many."""
        rows.items[:, 0].view(len(self.requests), -1).copy_(self.requests[:, None])


class JoinedBatch(StepBatch):
    """The only row of a step, after those ``beside`` it: all are rows of one request, so they
    attend together."""

    joins = True

    def __init__(self, slab: Slab, beside: Beside) -> None:
        super().__init__(slab, 1)
        self._beside = beside
        self.slots = torch.zeros(beside.num_rows, dtype=torch.int64, device=slab.shape.device)

    def load(
        self, rows: torch.Tensor, positions: torch.Tensor, adapters: torch.Tensor | None
    ) -> None:
        """The rows beside it know where it is."""

    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> StepInputs:
        assert self._beside is not None
        all_ids, all_positions, slots = self._beside.inputs()
        self.slots.copy_(slots)
        last = self._beside.last
        return all_ids.index_copy(0, last, ids), all_positions, last


def batch_of(slab: Slab, size: int, beside: Beside | None) -> StepBatch:
    """The batch for steps of ``size`` rows, with or without rows ``beside`` them."""
    if size == 1 and beside is not None:
        return JoinedBatch(slab, beside)
    return StepBatch(slab, size, beside)
