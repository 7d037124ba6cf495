"""A device for tests: slots that are filled as late as possible and spoilt as early as possible."""

from __future__ import annotations

import threading

import torch

from kvboost.model.streaming.slots import Copied

SPOILT = 0xFF
"""In all bytes of a float, it is NaN."""


class LateSlots:
    """Slots in memory. A copy is made only when something waits for it, and a slot that is released
    is spoilt at once: whoever uses a slot without waiting, or after its release, computes NaN."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self.buffers = torch.full((num_slots, num_bytes), SPOILT, dtype=torch.uint8, device=device)
        self._sources: dict[int, torch.Tensor] = {}
        self._used: set[int] = set()
        self._last = 0
        self._lock = threading.Lock()
        self.num_fills = self.num_waits = self.num_releases = 0

    def fill(self, slot: int, source: torch.Tensor) -> None:
        assert slot not in self._used, f"slot {slot} is overwritten while it is used"
        with self._lock:
            self._sources[slot] = source
            self._last = slot
        self.num_fills += 1

    def copied(self) -> Copied:
        return _Copied(self, self._last)

    def wait(self, slot: int) -> None:
        self.finish(slot)
        self._used.add(slot)
        self.num_waits += 1

    def release(self, slot: int) -> None:
        self._used.remove(slot)
        self.buffers[slot].fill_(SPOILT)
        self.num_releases += 1

    def finish(self, slot: int) -> None:
        """Makes the copy into a slot, if there is one to make."""
        with self._lock:
            source = self._sources.pop(slot, None)
            if source is not None:
                self.buffers[slot, : len(source)].copy_(source)


class _Copied:
    def __init__(self, slots: LateSlots, slot: int) -> None:
        self._slots, self._slot = slots, slot

    def synchronize(self) -> None:
        self._slots.finish(self._slot)
