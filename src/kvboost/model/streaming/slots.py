"""The buffers on a GPU that layers are streamed through."""

from __future__ import annotations

from typing import Protocol

import torch


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
        """What is computed from now on finds the slot filled."""

    def release(self, slot: int) -> None:
        """The slot is free once all that was asked for so far has been computed."""


class HostSlots:
    """Slots in the machine's own memory, filled at once: they show what streaming does where there
    is no GPU, and save nothing."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self.buffers = torch.empty(num_slots, num_bytes, dtype=torch.uint8, device=device)

    def fill(self, slot: int, source: torch.Tensor) -> None:
        self.buffers[slot, : len(source)].copy_(source)

    def copied(self) -> Copied:
        return _DONE

    def wait(self, slot: int) -> None:
        """It is filled already."""

    def release(self, slot: int) -> None:
        """It is free already: what was asked for has been computed."""


class _Done:
    def synchronize(self) -> None:
        """There is nothing to wait for."""


_DONE = _Done()


class CudaSlots:
    """Slots that a stream of their own fills while the current stream computes. Two events of each
    slot keep them apart: ``ready`` after it was filled, ``free`` after it was used."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self.buffers = torch.empty(num_slots, num_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._copies.wait_stream(torch.cuda.current_stream(device))  # what had the memory before
        self._ready = [torch.cuda.Event() for _ in range(num_slots)]
        self._free = [torch.cuda.Event() for _ in range(num_slots)]

    def fill(self, slot: int, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free[slot])
            self.buffers[slot, : len(source)].copy_(source, non_blocking=True)
            self._ready[slot].record(self._copies)

    def copied(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._copies)
        return event

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ready[slot])

    def release(self, slot: int) -> None:
        self._free[slot].record(torch.cuda.current_stream(self._device))
