"""What layers of ours need of a batch whose rows are in pages: where to write, and attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.model.attention import Batch
from kvboost.model.paged.slab import Slab
from kvboost.model.segment import Segment, rows_first
from kvboost.model.triton.write import write

Fresh = tuple[torch.Tensor, torch.Tensor]
"""The keys and values of a batch's rows, ``[rows, kv_heads, dim]`` each."""


class RowBatch(Batch):
    """Rows of one or more requests, all in pages of one slab."""

    slots: torch.Tensor
    """int64 ``[rows]``: where the rows are written in every layer."""
    is_fused = True
    adapters: torch.Tensor | None = None
    """int64 ``[rows]``: the slots of the rows' adapters in a decode step, negative for rows without
    one; None if no row has one."""

    def __init__(self, slab: Slab, segments: Sequence[Segment] = ()) -> None:
        super().__init__(segments)
        self._slab = slab

    def pages(self, layer: int) -> torch.Tensor:
        """A layer's pages, ``[pages, kv_heads, page, 2 * dim]``."""
        return self._slab.layers[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        write(rows_first(keys), rows_first(values), self.pages(layer), self.slots)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        fresh = rows_first(key), rows_first(value)
        rows = rows_first(query)
        return self.attend_rows(layer, rows, scale, window, softcap, fresh=fresh)[None]

    def attend_rows(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        *,
        fresh: Fresh | None = None,
    ) -> torch.Tensor:
        """Attention of ``query``, ``[rows, heads, dim]``; returns the same shape. ``fresh`` are the
        keys and values of these rows, which have been written."""
        raise NotImplementedError
