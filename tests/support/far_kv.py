"""Far rows on any machine: slots whose copies are late, and hold NaN when they may not be read."""

from __future__ import annotations

import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.costs import FarCosts
from kvboost.model.far.host import HostAttention
from kvboost.model.far.host_kv import HostFarKV
from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import FarMemory, HostMemory
from kvboost.model.far.rows import FarAttention
from kvboost.model.far.slots import Slots
from kvboost.model.far.streamed import StreamedAttention


def poison(memory: torch.Tensor) -> None:
    """All bits are set: any float is NaN."""
    memory.view(torch.uint8).fill_(255)


class LateTransfers:
    """As a GPU may do it: a copy is done when it is waited for, not before, and a slot that was
    released is overwritten at any time."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self.num_loads = 0

    def load(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        assert slot not in self._asked, "loaded twice"
        self._asked[slot] = source, target
        self.num_loads += 1

    def wait(self, slot: int) -> None:
        source, target = self._asked.pop(slot)
        target.copy_(source)
        self._slots[slot] = target

    def release(self, slot: int) -> None:
        if slot in self._slots:
            poison(self._slots.pop(slot))


def late_attention(
    shape: KVShape, slot_rows: int, host: HostAttention | None = None
) -> StreamedAttention:
    slots = Slots(shape, slot_rows, LateTransfers())
    poison(slots._data)
    return StreamedAttention(slots, FarCosts(), host)


def far_kv(
    shape: KVShape, num_rows: int, near_rows: int, attention: FarAttention, *, on_gpu: bool = False
) -> FarKV:
    """``on_gpu``: as for a model on another device."""

    def allocate(rows: int) -> FarMemory:
        return HostMemory(shape, rows)

    return (HostFarKV if on_gpu else FarKV)(shape, num_rows, near_rows, allocate, attention)


def copy_of(whole: RequestKV, end: int, split: int, kv: FarKV, fresh: int) -> None:
    """Puts the first ``end`` rows of ``whole`` into ``kv``: those before ``split`` become far, and
    ``fresh`` is the first of those that are computed next."""
    with kv.filling(0, split) as rows:
        rows.copy_(whole.rows(0, split))
    for first, last in ((split, fresh), (fresh, end)):
        if first < last:
            kv.prepare(first, last)
            for layer in range(whole.shape.num_layers):
                kv.write(layer, range(first, last), *whole.layer(layer, first, last))
