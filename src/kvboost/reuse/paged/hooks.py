"""What sees and serves the layers of a forward over pages."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.model.attention import StopForward
from kvboost.model.kv import RequestKV


class EnoughLayers(StopForward):
    """A hook has seen all it needs: the layers above need not run."""


class LayerHook(Protocol):
    """Sees a forward in every layer."""

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before fresh rows, ``[rows, kv_heads, dim]``, are written."""

    def on_query(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Before ``query``, ``[rows, heads, dim]``, attends; the fresh rows are in their pages.
        May raise ``EnoughLayers``."""


class WindowedHook(LayerHook, Protocol):
    """A hook that also knows layers with a window."""

    def on_query(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> None: ...


class Attention(Protocol):
    """Attends for the rows of one forward."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor: ...


class SegmentHook:
    """A hook over pages as the hook of a segment."""

    def __init__(self, hook: WindowedHook) -> None:
        self.hook = hook

    def on_fresh(self, layer: int, kv: RequestKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.hook.on_fresh(layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))

    def on_query(
        self, layer: int, kv: RequestKV, query: torch.Tensor, scale: float, window: int | None
    ) -> None:
        self.hook.on_query(layer, query[0].transpose(0, 1), scale, window)
