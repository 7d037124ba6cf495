"""The buffers on a GPU that layers are streamed through."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.model.execution.slot_events import SlotEvents


class Copied(Protocol):
    """Waits, on the host, until a copy has read its source."""

    def synchronize(self) -> None: ...


class Slots(Protocol):
    """Buffers on a device, each for one layer at a time. Calls are made in the order in which the
    device is to see them; none but ``Copied`` waits for it."""

    @property
    def buffers(self) -> torch.Tensor:
        """uint8 ``[slots, bytes]``, always in the same place."""

    def fill(self, slot: int, source: torch.Tensor) -> None:
        """Copies ``source``, uint8 on the host, into a slot as soon as that is free."""

    def copied(self) -> Copied:
        """The end of the copy that was asked for last."""

    def wait(self, slot: int) -> None:
        """Computations from now on find the slot filled."""

    def release(self, slot: int) -> None:
        """The slot is free once all that was asked for so far has been computed."""


class CudaSlots(SlotEvents):
    """Slots that a stream of their own fills while the current stream computes."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self.buffers = torch.empty(num_slots, num_bytes, dtype=torch.uint8, device=device)
        super().__init__(num_slots, device)

    def fill(self, slot: int, source: torch.Tensor) -> None:
        with self.filling(slot):
            self.buffers[slot, : len(source)].copy_(source, non_blocking=True)

    def copied(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event
