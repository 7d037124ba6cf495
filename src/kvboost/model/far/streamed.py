"""Attention to far rows for a model on a GPU. The host attends to some of them while the others
pass through slots of the GPU's memory, so that the bandwidths of RAM and of the bus add up."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from kvboost.model.execution.partial_attention import Part, merge_parts
from kvboost.model.execution.shared_attention import attend_dense
from kvboost.model.far.host import HostAttention
from kvboost.model.far.rows import FarRows
from kvboost.model.far.slots import Slots
from kvboost.model.triton.host import send

MOST_HOST_QUERIES = 16
"""Of more rows, all far rows are streamed: the device computes many in the time of the copy."""
GRID = 64


class Costs(Protocol):
    """The model by which far rows are divided: see :class:`FarCosts`."""

    def observe_host(self, num_bytes: int, num_queries: int, seconds: float) -> None: ...

    def host_share(self, num_queries: int) -> float: ...


class StreamedAttention:
    """``host`` is None if all rows are streamed."""

    def __init__(self, slots: Slots, costs: Costs, host: HostAttention | None) -> None:
        self.slots = slots
        self.costs = costs
        self._host = host
        self._division: tuple[tuple[int, int, int], int] | None = None
        self.num_streamed = self.num_on_host = 0
        """The number of times a layer was attended to by either method."""

    def attend(self, rows: FarRows, layer: int, query: torch.Tensor, scale: float) -> Part:
        on_host = self._num_on_host(rows, layer, query.shape[2])
        asked = query.cpu() if on_host else query  # waits for the device
        found: Part | None = None
        if on_host < rows.count:
            self.num_streamed += 1
            for keys, values in self.slots.parts(rows, layer, on_host):
                part = attend_dense(query, keys, values, scale)
                found = part if found is None else merge_parts(found, part)
        if on_host:  # meanwhile
            theirs = self._attend_on_host(rows.first(on_host), layer, asked, scale)
            theirs = send(theirs[0], query.device), send(theirs[1], query.device)
            found = theirs if found is None else merge_parts(found, theirs)
        assert found is not None
        return found[0].float(), found[1]

    def forget(self) -> None:
        self.slots.forget()
        if self._host is not None:
            self._host.forget()

    def _num_on_host(self, rows: FarRows, layer: int, num_queries: int) -> int:
        """The number of first rows that the host attends to: the same in all layers of a
        forward."""
        if self._host is None or num_queries > MOST_HOST_QUERIES:
            return 0
        key = (rows.data.data_ptr(), rows.count, num_queries)
        if layer == 0 or self._division is None or self._division[0] != key:
            share = self.costs.host_share(num_queries)
            count = rows.count if share == 1 else round(rows.count * share) // GRID * GRID
            self._division = key, count
        return self._division[1]

    def _attend_on_host(self, rows: FarRows, layer: int, query: torch.Tensor, scale: float) -> Part:
        assert self._host is not None
        self.num_on_host += 1
        start = time.perf_counter()
        found = self._host.attend(rows, layer, query, scale)
        self.costs.observe_host(rows.layer_bytes, query.shape[2], time.perf_counter() - start)
        return found
