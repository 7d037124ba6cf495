"""The KV of a model on a GPU whose first rows are in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import copy_rows

MOST_ROWS = 4096
"""Rows of one forward on a GPU: by arithmetic, so many compute longer than far rows are copied."""


class HostFarKV(FarKV):
    """Reading far rows copies them to the GPU. While all rows are far, a copy of one layer is on
    the GPU, and fresh rows are written to both."""

    _copy: tuple[int, torch.Tensor] | None = None
    """A layer, and its far rows ``[2, kv_heads, rows, head_dim]``."""

    @property
    def most_rows(self) -> int:
        return min(MOST_ROWS, super().most_rows)

    def prepare(self, first: int, end: int) -> None:
        self._copy = None
        super().prepare(first, end)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """On the GPU: a view, unless some of them are far."""
        if start >= self.start and not self._is_whole:
            return super().rows(start, end)
        until = end if self._is_whole else min(end, self.start)
        far = self._to_device(self._far.data[:, :, :, start:until])
        return torch.cat([far, self._near[:, :, :, : end - until]], 3) if until < end else far

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        if start >= self.start and not self._is_whole:
            return super().layer(layer, start, end)
        if self._is_whole:
            both = self._layer_copy(layer)[:, :, start:end]
        else:
            until = min(end, self.start)
            far = self._to_device(self._far.data[:, layer, :, start:until])
            both = torch.cat([far, self._near[:, layer, :, : end - until]], 2)
        return both[:1], both[1:]

    def write(
        self, layer: int, positions: range | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if not self._is_whole:
            super().write(layer, positions, keys, values)
            return
        if self._copy is not None and self._copy[0] == layer:
            at = positions
            if isinstance(at, range):
                at = torch.arange(at.start, at.stop, device=keys.device)
            self._copy[1].index_copy_(2, at, torch.cat([keys, values]))
        if isinstance(positions, torch.Tensor):
            positions = positions.cpu()
        super().write(layer, positions, keys.cpu(), values.cpu())

    @contextmanager
    def filling(self, start: int, end: int) -> Iterator[torch.Tensor]:
        self._copy = None
        with super().filling(start, end) as far:
            rows = self.shape.allocate(end - start)
            yield rows
            copy_rows(rows, far)
            self._wait()

    @contextmanager
    def changing(
        self, layer: int, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = self.layer(layer, start, end)
        yield keys, values
        if self._is_whole:  # these were of the copy
            self.write(layer, range(start, end), keys.clone(), values.clone())

    def _fill_far(self, start: int, end: int) -> None:
        super()._fill_far(start, end)
        self._wait()

    def _layer_copy(self, layer: int) -> torch.Tensor:
        if self._copy is None or self._copy[0] != layer:
            self._copy = None  # before the next one is allocated
            self._copy = layer, self._to_device(self._far.data[:, layer])
        return self._copy[1]

    def _to_device(self, far: torch.Tensor) -> torch.Tensor:
        copied = torch.empty(far.shape, dtype=far.dtype, device=self.shape.device)
        copy_rows(far, copied)
        return copied

    def _wait(self) -> None:
        """The host is about to read what the GPU copies, or to write over it."""
        self.shape.traits.wait(self.shape.device)
