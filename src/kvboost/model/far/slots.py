"""Two buffers on the device through which far rows pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.slot_events import SlotEvents
from kvboost.model.far.costs import FarCosts
from kvboost.model.far.memory import copy_rows
from kvboost.model.far.rows import FarRows

SLOTS = 2


class Transfers(Protocol):
    """Fills slots with rows. A slot is released at first, and then goes through load, wait and
    release again and again."""

    def load(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begins to copy ``source`` into ``target``, which is the slot's memory, as soon as what
        was computed from it before is done."""

    def wait(self, slot: int) -> None:
        """Computations from now on read what was loaded."""

    def release(self, slot: int) -> None:
        """No computation that starts later reads the slot."""


class CudaTransfers(SlotEvents):
    """Copies in a stream of their own, while the device computes; their times are observed."""

    def __init__(self, device: torch.device, costs: FarCosts) -> None:
        super().__init__(SLOTS, device, timed=True)
        self._begun = [torch.cuda.Event(enable_timing=True) for _ in range(SLOTS)]
        self._costs = costs
        self._num_bytes = [0] * SLOTS

    def load(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        self._observe(slot)
        with self.filling(slot):
            self._begun[slot].record(self.stream)
            copy_rows(source, target)
        self._num_bytes[slot] = target.nbytes

    def _observe(self, slot: int) -> None:
        filled = self.filled[slot]
        if self._num_bytes[slot] and filled.query():
            seconds = self._begun[slot].elapsed_time(filled) / 1e3
            self._costs.observe_stream(self._num_bytes[slot], seconds)


class Slots:
    """Loads far rows, layer by layer, one part after the other. While a part is used, the next one
    is loaded; after the last of a layer, that is the first of the next layer, and after the last
    layer the first of a next forward."""

    def __init__(
        self, shape: KVShape, num_rows: int, transfers: Transfers, slot_bytes: int | None = None
    ) -> None:
        """``slot_bytes``: what ``num_rows`` rows of one layer take, if not as much as near."""
        self.num_rows = num_rows
        if slot_bytes is None:
            slot_bytes = num_rows * shape.row_bytes // shape.num_layers
        self._data = torch.zeros(SLOTS, slot_bytes, dtype=torch.uint8, device=shape.device)
        self._num_layers = shape.num_layers
        self._transfers = transfers
        self._loading: deque[tuple[tuple[int, int, int, int], int, torch.Tensor]] = deque()
        """The parts asked for, in order: key, slot, and place in it."""
        self._free = deque(range(SLOTS))
        self._first = 0
        self._is_stale = False
        for slot in self._free:  # after the memory was cleared
            transfers.release(slot)

    def parts(
        self, rows: FarRows, layer: int, first: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of one layer, from row ``first`` on, ``[1, kv_heads, some, head_dim]``
        each, on the device. A pair is valid until the next one is asked for."""
        self._first = first
        for start in range(first, rows.count, self.num_rows):
            slot, target = self._take(rows, layer, start)
            try:
                self._transfers.wait(slot)
                yield rows.unpack(target, layer, start)
            finally:
                self._transfers.release(slot)
                self._free.append(slot)
            self._load_after(rows, layer, start)

    def forget(self) -> None:
        """Uses nothing of what was loaded ahead: its rows are about to change, or to go. Any thread
        may call this, also while another one reads parts of other rows."""
        self._is_stale = True

    def _drop(self) -> None:
        self._is_stale = False
        while self._loading:
            _, slot, _ = self._loading.popleft()
            self._transfers.wait(slot)
            self._transfers.release(slot)
            self._free.append(slot)

    def _take(self, rows: FarRows, layer: int, start: int) -> tuple[int, torch.Tensor]:
        key = self._key(rows, layer, start)
        if self._is_stale or not self._loading or self._loading[0][0] != key:
            self._drop()  # another request's, or rows have been added
            self._load(rows, layer, start)
            self._load_after(rows, layer, start)
        _, slot, target = self._loading.popleft()
        return slot, target

    def _load_after(self, rows: FarRows, layer: int, start: int) -> None:
        """Fills the free slots with what follows the last part that is loading."""
        if self._loading:
            (_, layer, start, _), *_ = self._loading[-1]
        while self._free:
            start += self.num_rows
            if start >= rows.count:
                layer, start = (layer + 1) % self._num_layers, self._first
            self._load(rows, layer, start)

    def _load(self, rows: FarRows, layer: int, start: int) -> None:
        slot = self._free.popleft()
        end = min(start + self.num_rows, rows.count)
        source = rows.source(layer, start, end)
        target = self._data[slot, : source.nbytes].view(source.dtype).view(source.shape)
        self._transfers.load(slot, source, target)
        self._loading.append((self._key(rows, layer, start), slot, target))

    @staticmethod
    def _key(rows: FarRows, layer: int, start: int) -> tuple[int, int, int, int]:
        return rows.data.data_ptr(), layer, start, rows.count
