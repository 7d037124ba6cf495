"""A request's KV whose first rows are far, and whose last rows are near."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvboost.model.execution.kv import RequestKV, SharedRows
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.memory import FarMemory, copy_rows
from kvboost.model.far.rows import FarAttention, FarRows

GRID = 64
"""Rows become far in multiples of this."""
KEPT_SHARE = 0.75
"""When near memory is full, so much of it stays in use, and the rest is free for the next rows."""


class FarKV(RequestKV):
    """The same contract as :class:`RequestKV`, over rows in two places::

        far    |===================|
        near                       |-----------|         start = base.count

    Rows of the cache are placed in far memory. Computed rows are written near; when near memory is
    full, its first rows become far. While rows anywhere may change, as in a repair, all of them
    are far::

        far    |-------------------------------|         start = 0, base is None
    """

    shares = False
    is_far = True

    def __init__(
        self,
        shape: KVShape,
        num_tokens: int,
        near_rows: int,
        allocate: Callable[[int], FarMemory],
        attention: FarAttention,
    ) -> None:
        """``allocate`` gives far memory for so many rows."""
        self.shape = shape
        self.base: SharedRows | None = None
        self._attention = attention
        self._near = shape.allocate(near_rows)
        self._allocate = allocate
        self._far = allocate(num_tokens)  # last: only ``close`` gives it back
        self._is_whole = True
        self._written = 0
        """Rows that may hold something: those of forwards that were prepared."""
        self._make_whole()

    @property
    def far_data(self) -> torch.Tensor:
        """Far memory, ``[2, layers, kv_heads, capacity, head_dim]``."""
        return self._far.data

    @property
    def near_rows(self) -> int:
        return self._near.shape[3]

    @property
    def most_rows(self) -> int:
        """Rows of one forward: the others that are near stay there."""
        return max(1, self.near_rows // 2)

    @property
    def capacity(self) -> int:
        return self._far.num_rows if self._is_whole else self.start + self.near_rows

    @property
    def far_rows(self) -> int:
        """The number of first rows that are far."""
        return self._written if self._is_whole else self.own_start

    def prepare(self, first: int, end: int) -> None:
        if end - first > self.near_rows:
            raise RuntimeError(f"{end - first} rows in one forward, but {self.near_rows} are near")
        if self._is_whole:
            self._split(first)
        elif end > self.capacity:
            wanted = min(end - int(self.near_rows * KEPT_SHARE), first) // GRID * GRID
            wanted = max(wanted, self.start)
            self._make_far(wanted if end - wanted <= self.near_rows else first, first)
        self._written = end

    def reserve(self, num_tokens: int) -> None:
        """Makes space for rows anywhere: all become far."""
        if not self._is_whole:
            self._fill_far(self.start, min(self._written, self.capacity))
            self._make_whole()
        self._grow_far(num_tokens)
        self._written = max(self._written, num_tokens)

    def attach_prefix(self, base: SharedRows | None) -> None:
        raise RuntimeError("a request with far rows begins with its own")

    def share(self, count: int) -> SharedRows:
        raise RuntimeError("far rows are not shared")

    def detach_prefix(self) -> None:
        self.reserve(self._written)

    def memory(self) -> dict[int, int]:
        return {id(self._near): self._near.nbytes}

    @property
    def spared_bytes(self) -> int:
        return 0

    @contextmanager
    def filling(self, start: int, end: int) -> Iterator[torch.Tensor]:
        self.reserve(end)
        yield self._far.data[:, :, :, start:end]

    def close(self) -> None:
        """Gives far memory back."""
        self._attention.forget()
        self._far.close()

    def _make_whole(self) -> None:
        self._is_whole = True
        self.base, self.start = None, 0
        self._attention.forget()
        self._hold(self._far.data)

    def _split(self, first: int) -> None:
        """Rows before ``first`` are far from now on; those after it are computed next."""
        self._is_whole = False
        self._hold(self._near)
        self._see_far(first)

    def _see_far(self, count: int) -> None:
        self.start = count
        self.base = None
        if count:
            self.base = FarRows(self._far.data, count, self._attention)

    def _make_far(self, count: int, written: int) -> None:
        """Moves near rows before ``count`` to far memory; rows before ``written`` are in place."""
        before = self.start
        self._fill_far(before, count)
        for layer in self._near.unbind(1):
            kept = layer[:, :, count - before : written - before].clone()
            layer[:, :, : written - count].copy_(kept)
        self._see_far(count)

    def _fill_far(self, start: int, end: int) -> None:
        """Copies near rows to far memory."""
        self._grow_far(end)
        near = self._near[:, :, :, start - self.start : end - self.start]
        copy_rows(near, self._far.data[:, :, :, start:end])

    def _grow_far(self, num_rows: int) -> None:
        if num_rows > self._far.num_rows:
            old = self._far
            self._far = self._allocate(max(num_rows, old.num_rows * 3 // 2))
            self._far.data[:, :, :, : old.num_rows].copy_(old.data)
            self._attention.forget()
            old.close()
            if self._is_whole:
                self._hold(self._far.data)
