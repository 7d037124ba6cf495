"""A request's KV whose far rows are in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.codes import CodedMemory, CodedRows
from kvboost.model.far.host_kv import MOST_ROWS
from kvboost.model.far.kv import FarKV
from kvboost.model.far.rows import FarAttention

LEAST_NEAR_ROWS = 256
"""With fewer near rows, far rows would not be whole groups."""


class CodedKV(FarKV):
    """Far rows do not change once they are written, and they are not what was computed. Rows of the
    cache are placed first, in any order; those after the last whole group become near."""

    changes_rows = False
    is_exact = False

    def __init__(
        self,
        shape: KVShape,
        num_tokens: int,
        near_rows: int,
        allocate: Callable[[int], CodedMemory],
        attention: FarAttention,
    ) -> None:
        self.shape = shape
        self._attention = attention
        self._near = shape.allocate(near_rows)
        self._coded = allocate(num_tokens)  # last: only ``close`` gives it back
        self._group = self._coded.codec.group
        self._written = 0
        self._edges: dict[int, tuple[torch.Tensor, set[int]]] = {}
        """Groups that are placed in part: their rows, and which of them are there."""
        self._is_whole = True
        self.base, self.start = None, 0
        self._hold(self._near)

    @property
    def most_rows(self) -> int:
        return min(MOST_ROWS, super().most_rows)

    @property
    def capacity(self) -> int:
        return self.start + self.near_rows

    def reserve(self, num_tokens: int) -> None:
        if num_tokens > self.capacity:
            raise RuntimeError("rows that are far in fewer bits do not change")

    def close(self) -> None:
        self._attention.forget()
        self._coded.close()

    @contextmanager
    def filling(self, start: int, end: int) -> Iterator[torch.Tensor]:
        assert self._is_whole, "rows of the cache are placed before others are computed"
        rows = self.shape.allocate(end - start)
        yield rows
        group = self._group
        first, last = -(-start // group) * group, end // group * group
        if first < last:
            self._coded.write(first, rows[:, :, :, first - start : last - start])
        edges = ((start, first), (last, end)) if first <= last else ((start, end),)
        for low, high in edges:
            if low < high:
                self._add_edge(low, rows[:, :, :, low - start : high - start])

    def rows(self, start: int, end: int) -> torch.Tensor:
        layers = [torch.cat(self.layer(n, start, end)) for n in range(self.shape.num_layers)]
        return torch.stack(layers, 1)

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        if start >= self.start:
            return super().layer(layer, start, end)
        until = min(end, self.start)
        far = self._coded.read(layer, start, until)
        both = torch.cat([far, self._near[:, layer, :, : end - until]], 2)
        return both[:1], both[1:]

    def _add_edge(self, start: int, rows: torch.Tensor) -> None:
        group = self._group
        number, offset, count = start // group, start % group, rows.shape[3]
        if number not in self._edges:
            self._edges[number] = self.shape.allocate(group), set()
        buffer, there = self._edges[number]
        buffer[:, :, :, offset : offset + count] = rows
        there.update(range(offset, offset + count))
        if len(there) == group:
            self._coded.write(number * group, buffer)
            del self._edges[number]

    def _split(self, first: int) -> None:
        self._is_whole = False
        count = first // self._group * self._group
        if first > count:
            buffer, _ = self._edges[first // self._group]
            self._near[:, :, :, : first - count] = buffer[:, :, :, : first - count]
        self._edges.clear()
        self._see_far(count)

    def _see_far(self, count: int) -> None:
        self.start = count
        self.base = CodedRows(self._coded, count, self._attention) if count else None

    def _fill_far(self, start: int, end: int) -> None:
        self._coded.write(start, self._near[:, :, :, start - self.start : end - self.start])
