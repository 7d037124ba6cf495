"""The far rows of a request, as attention sees them."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.model.execution.kv import SharedRows
from kvboost.model.execution.partial_attention import Part


class FarAttention(Protocol):
    """Attends to far rows. One forward at a time calls it."""

    def attend(self, rows: FarRows, layer: int, query: torch.Tensor, scale: float) -> Part:
        """Attention of ``query``, ``[1, heads, rows, dim]``, over all of ``rows`` in one layer; the
        result is in float32, on the device of the query."""

    def forget(self) -> None:
        """Some far rows are about to change or to go."""


class FarRows(SharedRows):
    """The first ``count`` rows of ``data``, ``[2, layers, kv_heads, capacity, head_dim]``, which is
    not in the model's memory."""

    is_far = True

    def __init__(self, data: torch.Tensor, count: int, attention: FarAttention) -> None:
        super().__init__(data, count)
        self._attention = attention
        self._shorter_rows: FarRows | None = None

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> Part:
        return self._attention.attend(self, layer, query, scale)

    def first(self, count: int) -> FarRows:
        if count >= self.count:
            return self
        if self._shorter_rows is None or self._shorter_rows.count != count:
            self._shorter_rows = FarRows(self.data, count, self._attention)
        return self._shorter_rows

    def source(self, layer: int, start: int, end: int) -> torch.Tensor:
        """The tensors to copy to the device to attend to rows ``[start, end)`` there."""
        return self.data[:, layer, :, start:end]

    def unpack(
        self, copied: torch.Tensor, layer: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a copied ``source`` that began at ``start``, ``[1, kv_heads,
        rows, head_dim]`` each."""
        return copied[:1], copied[1:]

    @property
    def layer_bytes(self) -> int:
        """The bytes that attending to one layer reads."""
        return self.data[:, 0, :, : self.count].nbytes
