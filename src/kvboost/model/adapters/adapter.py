"""An adapter in memory, and the part of a request that it applies to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Delta:
    """The change of one linear layer's output by an adapter: ``rows @ down.T @ up``."""

    down: torch.Tensor
    """``[rank, in]``"""
    up: torch.Tensor
    """``[rank, out]``, multiplied by the adapter's scale."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """The weights of one adapter, in the dtype and on the device of its model."""

    digest: str
    """Identifies what it computes, whatever it is called."""
    rank: int
    """The largest of its ranks."""
    deltas: Mapping[str, Delta]
    """By the path of the module in the model."""
    invocation: tuple[int, ...] = ()
    """Of an activated adapter (aLoRA): the tokens from which on it applies. Rows before them are
    those of the base model."""

    @property
    def num_bytes(self) -> int:
        return sum(delta.down.nbytes + delta.up.nbytes for delta in self.deltas.values())

    def applied_to(self, token_ids: TokenIds) -> AppliedAdapter | None:
        """The adapter for a prompt; None if it is an activated one that the prompt does not
        invoke."""
        if not self.invocation:
            return AppliedAdapter(self)
        start = _last_occurrence(token_ids, self.invocation)
        return None if start is None else AppliedAdapter(self, start)


@dataclass(frozen=True)
class AppliedAdapter:
    """An adapter of one request."""

    adapter: Adapter
    start: int = 0
    """The first position it applies to."""

    @property
    def is_activated(self) -> bool:
        """Whether the rows before ``start`` are those of the base model."""
        return bool(self.adapter.invocation)


def _last_occurrence(token_ids: TokenIds, wanted: tuple[int, ...]) -> int | None:
    """Where ``wanted`` begins for the last time in ``token_ids``."""
    if len(wanted) > len(token_ids):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, len(wanted))
    found = np.flatnonzero((windows == np.array(wanted)).all(1))
    return int(found[-1]) if len(found) else None
