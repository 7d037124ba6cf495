"""Attention to far rows where they are: on the CPU, by our kernels if they serve the rows, else by
torch's."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.partial_attention import Part, attend_part
from kvboost.model.far.rows import FarRows
from kvboost.model.native.kernels import Kernels, PartPlan

PIECES_PER_THREAD = 4
LEAST_PIECE, GRID = 512, 64
"""Keys that one thread attends to at a time: at least so many, in multiples of the grid."""


class HostAttention:
    """Attends on the CPU."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = replace(shape, device=torch.device("cpu"))
        self._kernels = Kernels.for_shape(self._shape)
        self._plan: tuple[tuple[int, int, int, int], PartPlan] | None = None

    def attend(self, rows: FarRows, layer: int, query: torch.Tensor, scale: float) -> Part:
        asked = query.to("cpu")
        if self._kernels is None:
            out, sums = attend_part(asked, rows.keys[layer], rows.values[layer], scale)
        else:
            plan = self._plan_for(rows, query.shape[2])
            out, sums = _merge(self._kernels.attend_parts(plan, layer, asked, scale))
        return out.float().to(query.device), sums.to(query.device)

    def forget(self) -> None:
        self._plan = None

    def _plan_for(self, rows: FarRows, num_queries: int) -> PartPlan:
        """The plan is the same in all layers, so the last one is kept."""
        threads = torch.get_num_threads()
        key = (rows.data.data_ptr(), rows.count, num_queries, threads)
        if self._plan is None or self._plan[0] != key:
            pieces = max(1, PIECES_PER_THREAD * threads // self._shape.num_kv_heads)
            size = max(LEAST_PIECE, -(-rows.count // (pieces * GRID)) * GRID)
            self._plan = key, PartPlan(rows.data, rows.count, size, num_queries, self._shape)
        return self._plan[1]


def _merge(parts: torch.Tensor) -> Part:
    """Parts ``[pieces, rows, heads, dim + 1]``, the last being the log2-sum-exp2, as one."""
    outputs, sums = parts[..., :-1], parts[..., -1]
    total = torch.logsumexp(sums * math.log(2), 0)
    shares = torch.exp(sums * math.log(2) - total)
    out = (outputs * shares[..., None]).sum(0)
    return out.transpose(0, 1)[None], total.transpose(0, 1)[None]
