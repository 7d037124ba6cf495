"""What sees and serves the layers of our forwards over vLLM's model."""

from __future__ import annotations

from typing import Protocol

import torch


class EnoughLayers(Exception):
    """A hook has seen all it needs: the layers above need not run."""


class LayerHook(Protocol):
    """Sees our forward in every layer."""

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before fresh rows, ``[rows, kv_heads, dim]``, are written."""

    def on_query(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Before ``query``, ``[rows, heads, dim]``, attends; the fresh rows are in their pages.
        May raise ``EnoughLayers``."""


class Attention(Protocol):
    """Attends for the rows of one forward in place of vLLM's backend."""

    def __call__(
        self, layer: int, query: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None: ...
