"""The order of copies into a GPU's buffers and of what is computed from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SlotEvents:
    """Slots are filled in ``stream`` while the current stream computes. Two events of each slot
    keep the two apart: ``filled`` after it was filled, and one after it was used. The host waits
    for neither."""

    def __init__(self, num_slots: int, device: torch.device, *, timed: bool = False) -> None:
        """``timed``: whether the times of ``filled`` are asked for."""
        self._device = device
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # what had the memory before
        self.filled = [torch.cuda.Event(enable_timing=timed) for _ in range(num_slots)]
        self._free = [torch.cuda.Event() for _ in range(num_slots)]

    @contextmanager
    def filling(self, slot: int) -> Iterator[None]:
        """Copies that are asked for meanwhile are made as soon as the slot is free."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self._free[slot])
            yield
            self.filled[slot].record(self.stream)

    def wait(self, slot: int) -> None:
        """Computations from now on find the slot filled."""
        torch.cuda.current_stream(self._device).wait_event(self.filled[slot])

    def release(self, slot: int) -> None:
        """The slot is free once all that was asked for so far has been computed."""
        self._free[slot].record(torch.cuda.current_stream(self._device))
