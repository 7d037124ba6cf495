"""Known KV into the request's own: in place as it is, moved text with its keys turned."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.reuse.plan import Plan
from kvboost.reuse.rope import Rotation


class KVRows(Protocol):
    """A request's preallocated KV."""

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A view of rows ``[start, end)``: ``[2, layers, kv_heads, end - start, head_dim]``."""


def place(plan: Plan, kv: KVRows, rotation: Rotation | None) -> None:
    """Copies the rows of ``plan``'s hits into ``kv``. Hits must be pinned; a plan with moved runs
    needs the model's ``rotation``."""
    for hit in plan.in_place:
        assert hit.distance == 0
        kv.rows(hit.start, hit.end).copy_(hit.kv, non_blocking=True)
    for run in plan.moved:
        assert rotation is not None
        for hit in run.hits:
            keys, values = kv.rows(hit.start, hit.end)
            values.copy_(hit.kv[1], non_blocking=True)
            rotation.move(hit.kv[0].to(keys.device, non_blocking=True), hit.distance, keys)
