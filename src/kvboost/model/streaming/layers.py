"""Decoder layers whose weights are on the device only while they are needed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from kvboost.model.streaming.disk import DiskLayers
from kvboost.model.streaming.slots import Slots


def slot_of(number: int, num_slots: int) -> int:
    """The slot of the layer that is the ``number``-th of those that are streamed."""
    return number % num_slots


class StreamedLayers:
    """Streams some layers of a model, in the order in which it runs them. The tensors of the n-th
    are views of ``slot_of(n, slots)``, which never change: whoever fills the slot fills the layer.
    One forward may run at a time."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        sizes: Sequence[int],
        slots: Slots,
        in_memory: Mapping[int, torch.Tensor],
        on_disk: DiskLayers | None = None,
    ) -> None:
        """``sizes``: bytes of each layer. ``in_memory`` has the slabs of some, by number, and
        ``on_disk`` those of all others."""
        self._slots = slots
        self._num_slots = len(slots.buffers)
        self._num_layers = len(layers)
        self._sizes = sizes
        self._in_memory = in_memory
        self._on_disk = on_disk
        self._held: list[int | None] = [None] * self._num_slots
        self.copied_bytes = 0
        """All that was sent to the device so far."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, number))
            layer.register_forward_hook(partial(self._after, number), always_call=True)
        if on_disk is not None:
            weakref.finalize(self, on_disk.close)
        for number in range(self._num_slots):
            self._prefetch(number)

    def __len__(self) -> int:
        return self._num_layers

    @property
    def pass_bytes(self) -> int:
        """The bytes that a pass through the model sends to the device."""
        return sum(self._sizes)

    def _slot(self, number: int) -> int:
        return slot_of(number, self._num_slots)

    def _before(self, number: int, module: nn.Module, args: Any) -> None:
        slot = self._slot(number)
        if self._held[slot] != number:  # read from disk just now, or the last pass ended early
            self._fill(number)
        self._slots.wait(slot)

    def _after(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        following = number + self._num_slots
        if following >= self._num_layers:
            following = self._slot(number)  # of the next pass
        if following != number:
            self._held[self._slot(number)] = None
            self._slots.release(self._slot(number))
            self._prefetch(following)

    def _prefetch(self, number: int) -> None:
        """Starts to fill the slot of a layer before that is needed. The host does not wait for a
        layer that is still being read from disk."""
        on_disk = self._on_disk
        if number in self._in_memory or (on_disk is not None and on_disk.is_read(number)):
            self._fill(number)

    def _fill(self, number: int) -> None:
        slot = self._slot(number)
        if number in self._in_memory:
            self._slots.fill(slot, self._in_memory[number])
        else:
            assert self._on_disk is not None
            self._slots.fill(slot, self._on_disk.take(number))
            self._on_disk.give_back(number, self._slots.copied())
        self._held[slot] = number
        self.copied_bytes += self._sizes[number]
