"""Attention to far rows for a model on a GPU: streamed through slots of its memory, or computed on
the host, whichever is faster."""

from __future__ import annotations

import time

import torch

from kvboost.model.far.costs import FarCosts
from kvboost.model.far.host import HostAttention
from kvboost.model.far.rows import FarRows, Part
from kvboost.model.far.slots import Slots
from kvboost.model.shared_attention import attend_dense, merge_parts

MOST_HOST_QUERIES = 16
"""More rows than this are streamed: the device computes many rows in the time of the copy."""


class StreamedAttention:
    """``host`` is None if rows are only streamed."""

    def __init__(self, slots: Slots, costs: FarCosts, host: HostAttention | None) -> None:
        self.slots = slots
        self.costs = costs
        self._host = host
        self.num_streamed = self.num_on_host = 0
        """How often a layer was attended to by either method."""

    def attend(self, rows: FarRows, layer: int, query: torch.Tensor, scale: float) -> Part:
        num_queries = query.shape[2]
        host = self._host if num_queries <= MOST_HOST_QUERIES else None
        if host is not None and self.costs.choose(num_queries) == "host":
            return self._attend_on_host(host, rows, layer, query, scale)
        self.num_streamed += 1
        found: Part | None = None
        for keys, values in self.slots.parts(rows, layer):
            part = attend_dense(query, keys, values, scale)
            found = part if found is None else merge_parts(found, part)
        assert found is not None
        return found[0].float(), found[1]

    def forget(self) -> None:
        self.slots.forget()
        if self._host is not None:
            self._host.forget()

    def _attend_on_host(
        self, host: HostAttention, rows: FarRows, layer: int, query: torch.Tensor, scale: float
    ) -> Part:
        self.num_on_host += 1
        asked = query.cpu()  # waits for the device: only what follows is measured
        start = time.perf_counter()
        out, sums = host.attend(rows, layer, asked, scale)
        self.costs.observe_host(rows.layer_bytes, query.shape[2], time.perf_counter() - start)
        return out.to(query.device), sums.to(query.device)
