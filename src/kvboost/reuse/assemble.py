"""Known KV into the request's own, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvboost.cache.store import Hit
from kvboost.results import Span, SpanKind


class KVRows(Protocol):
    """A request's preallocated KV."""

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A view of rows ``[start, end)``: ``[2, layers, kv_heads, end - start, head_dim]``."""


def place(spans: Sequence[Span], hits: Sequence[Hit], kv: KVRows) -> None:
    """Copies the rows of exact spans into ``kv`` as they are. Hits must be pinned."""
    donors = {str(hit.chunk.key): hit.chunk for hit in hits}
    for span in spans:
        if span.kind is SpanKind.EXACT and span.donor is not None:
            known = donors[span.donor].kv[:, :, :, : span.num_tokens]
            kv.rows(span.start, span.end).copy_(known, non_blocking=True)
