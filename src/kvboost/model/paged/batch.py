"""Packed segments whose KV is in pages: one kernel writes the fresh rows, and one attends for all
segments that torch has no faster one for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from kvboost.model.attention import Batch, attend_segment
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import PAGE, Slab
from kvboost.model.segment import Segment, split
from kvboost.model.triton.attention import attend
from kvboost.model.triton.rows import PagedRows, Tile
from kvboost.model.triton.write import write

LEAST_DENSE_ROWS = 256
"""From so many consecutive rows on, gathering the keys and calling torch's causal kernel is faster
than reading the pages in place."""


class PagedBatch(Batch):
    """Segments that go through the model packed into one row; all in pages of one slab."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(segments)
        self._kvs = [segment.kv for segment in segments if isinstance(segment.kv, PagedKV)]
        assert len(self._kvs) == len(segments)
        self._slab: Slab = self._kvs[0].slab
        self._rows: dict[tuple[tuple[int, ...], int], PagedRows] = {}

    @cached_property
    def _positions(self) -> list[torch.Tensor]:
        """The positions of each segment, on the CPU."""
        return [segment.position_ids(torch.device("cpu")).cpu() for segment in self.segments]

    @cached_property
    def _slots(self) -> torch.Tensor:
        """Where the fresh rows are written."""
        for kv, segment in zip(self._kvs, self.segments, strict=True):
            if segment.first < kv.own_start or segment.end > kv.capacity:
                raise RuntimeError(
                    f"rows [{segment.first}, {segment.end}) are not this request's own: it has "
                    f"[{kv.own_start}, {kv.capacity})"
                )
        counts = torch.tensor([len(segment) for segment in self.segments])
        requests = torch.tensor([kv.holding.row for kv in self._kvs])
        sent = torch.stack([torch.cat(self._positions), requests.repeat_interleave(counts)])
        position, request = sent.to(self._slab.shape.device)
        return self._slab.table[request, position // PAGE].long() * PAGE + position % PAGE

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.has_hooks:
            split_keys, split_values = (split(rows, self.segments) for rows in (keys, values))
            for segment, k, v in zip(self.segments, split_keys, split_values, strict=True):
                if segment.hook is not None:
                    segment.hook.on_fresh(layer, segment.kv, k, v)
        pages = self._slab.layers[layer]
        write(keys[0].transpose(0, 1), values[0].transpose(0, 1), pages, self._slots)

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
        hidden = [segment.hides(window) for segment in self.segments]
        dense = {
            index
            for index, segment in enumerate(self.segments)
            if softcap is None and hidden[index] is None and _is_dense(segment)
        }
        others = tuple(index for index in range(len(self.segments)) if index not in dense)
        queries = split(query, self.segments)
        parts: dict[int, torch.Tensor] = {}
        if others:
            whole = query if not dense else torch.cat([queries[index] for index in others], 2)
            out = attend(
                whole[0].transpose(0, 1),
                self._slab.layers[layer],
                self._rows_of(others, query.shape[1]),
                scale,
                window=window if any(hidden) else None,
                soft_cap=softcap,
                absent=self._absent(others),
            )
            if not dense:
                return out[None]
            counts = [len(self.segments[index]) for index in others]
            parts.update(zip(others, out.split(counts), strict=True))
        keys, values = split(key, self.segments), split(value, self.segments)
        for index in dense:
            segment = self.segments[index]
            part = attend_segment(
                segment, queries[index], keys[index], values[index], layer, scale, None, None
            )
            parts[index] = part[0].transpose(0, 1)
        return torch.cat([parts[index] for index in range(len(parts))])[None]

    def _rows_of(self, indices: tuple[int, ...], heads: int) -> PagedRows:
        """The rows of these segments, for the kernel; made once a forward."""
        if (indices, heads) not in self._rows:
            requests = torch.tensor([self._kvs[index].holding.row for index in indices])
            shape = self._slab.shape
            most = max(len(self.segments[index]) for index in indices)
            group = heads // shape.num_kv_heads
            self._rows[indices, heads] = PagedRows.of(
                [self._positions[index] for index in indices],
                self._slab.table[requests.to(shape.device)],
                page=PAGE,
                heads=heads,
                kv_heads=shape.num_kv_heads,
                dtype=shape.dtype,
                tile=Tile.pick(group * most, shape.dtype, shape.head_dim),
            )
        return self._rows[indices, heads]

    def _absent(self, indices: tuple[int, ...]) -> torch.Tensor | None:
        """Which rows of each of these segments no query may attend to."""
        segments = [self.segments[index] for index in indices]
        if all(segment.absent is None for segment in segments):
            return None
        end = max(segment.end for segment in segments)
        device = self._slab.shape.device
        absent = torch.zeros(len(segments), end, dtype=torch.bool, device=device)
        for row, segment in zip(absent, segments, strict=True):
            if segment.absent is not None:
                row[: len(segment.absent)] = segment.absent
        return absent


def _is_dense(segment: Segment) -> bool:
    """Whether torch's causal kernels serve this segment better: it is a whole sequence, which is
    then computed as stock transformers computes it, or has many consecutive rows."""
    return segment.is_plain and (segment.first == 0 or len(segment) >= LEAST_DENSE_ROWS)
