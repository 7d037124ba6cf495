"""The attention of a forward over pages, and the kinds of captured forwards."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.model.execution.attention import StopForward
from kvboost.model.execution.segment import Rules

ROWS, REPAIRS, PROBES = "rows of prompts", "repairs", "probes"
"""Kinds of captured forwards. One of rows has no hook; those of the others say their kind."""
SCORED = "rows with several logits"
"""Rows that heal during an answer, and those of the answer, which they are compared with."""


class EnoughLayers(StopForward):
    """A hook has seen all it needs: the layers above need not run."""


class Attention(Protocol):
    """Attends for the rows of one forward."""

    def __call__(
        self, layer: int, query: torch.Tensor, rules: Rules, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...
