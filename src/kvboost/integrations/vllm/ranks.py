"""Agreement between the workers of tensor parallelism.

Each worker holds some heads of every row, and the model's forward adds up what they compute. So a
forward of ours runs in all of them or in none, over the same rows: they must choose alike, and each
must know whether the others have their part of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class Ranks:
    """The workers of ``group``; without one, a worker that is alone."""

    def __init__(self, group: GroupCoordinator | None = None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None

    @property
    def are_several(self) -> bool:
        return self._group is not None

    def mean(self, part: torch.Tensor) -> torch.Tensor:
        """The mean of every worker's ``part``. All get the same bits: each adds in the order of the
        ranks, so that equal scores are ranked alike."""
        if self._group is None:
            return part
        parts: torch.Tensor = self._group.all_gather(part[None].contiguous(), dim=0)
        return parts.mean(0)

    def least(self, number: float) -> float:
        """The smallest ``number`` of all workers. They wait for each other."""
        if self._group is None:
            return number
        shared = torch.tensor(number, dtype=torch.float64)
        torch.distributed.all_reduce(
            shared, torch.distributed.ReduceOp.MIN, group=self._group.cpu_group
        )
        return float(shared)
