"""Adapters of decode steps: their weights side by side, so that a CUDA graph finds those of each
row by a number on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvboost.model.adapters.adapter import Adapter
from kvboost.model.triton.adapters import Addition, num_splits, shrink
from kvboost.model.triton.host import aside, side_stream

Product = Callable[[torch.Tensor], torch.Tensor]

FIRST_SLOTS, MOST_SLOTS = 8, 64
"""The number of adapters that there is room for at first, and at most unless a single step has
more."""
NO_ADAPTER = -1
LEAST_RANK, MOST_RANK = 16, 128
"""Ranks are padded to a power of two between these; an adapter of a higher one runs eagerly."""


@dataclass
class Place:
    """Linear layers that read the same rows, whose outputs follow one another."""

    names: Sequence[str]
    width: int
    heights: Sequence[int]
    down: torch.Tensor | None = None
    """``[slots, layers * ranks, in]``; None while no adapter changes these layers."""
    up: torch.Tensor | None = None
    """``[slots, ranks, out]``"""

    def start(
        self, rows: torch.Tensor, slots: torch.Tensor, product: Product
    ) -> tuple[torch.Tensor, Addition | None]:
        """``product(rows)``, contiguous ``[rows, out]``, and what the adapters of ``slots`` add to
        it. On a GPU the first factor runs beside the product."""
        if self.down is None or self.up is None:
            return product(rows), None
        size = num_splits(self.width), len(rows), self.down.shape[1]
        sums = torch.empty(size, dtype=torch.float32, device=rows.device)
        given = rows, slots, self.down, self.up.shape[1], sums
        side = side_stream(rows.device)
        with aside(side):
            shrink(*given)
        out = product(rows)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        return out, Addition(sums, slots, self.up)

    def allocate(self, slots: int, ranks: int, like: torch.Tensor) -> None:
        """Makes room for more; what was there is written again."""
        sizes = (slots, len(self.names) * ranks, self.width), (slots, ranks, sum(self.heights))
        self.down, self.up = (
            torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes
        )

    def write(self, slot: int, adapter: Adapter) -> None:
        if self.down is None or self.up is None:
            return
        ranks, start = self.up.shape[1], 0
        self.down[slot].zero_()
        self.up[slot].zero_()
        for number, (name, height) in enumerate(zip(self.names, self.heights, strict=True)):
            delta = adapter.deltas.get(name)
            if delta is not None:
                first, rank = number * ranks, len(delta.down)
                self.down[slot, first : first + rank] = delta.down
                self.up[slot, :rank, start : start + height] = delta.up
            start += height


class AdapterSlots:
    """Where the weights of adapters are. One thread at a time may call it."""

    def __init__(self, places: Sequence[Place]) -> None:
        """``places``: those of all layers that steps run."""
        self._places = places
        self._by_name = {name: place for place in places for name in place.names}
        self._slots: OrderedDict[Adapter, int] = OrderedDict()
        """The least recently used first."""
        self._num_slots = self._ranks = 0
        self.on_changed: Callable[[], None] = lambda: None
        """Called when tensors have been replaced, of which there may be graphs."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when a slot has got another adapter."""

    def takes(self, adapter: Adapter) -> bool:
        """Whether steps can run rows with this adapter."""
        if adapter in self._slots:
            return True
        return adapter.rank <= MOST_RANK and adapter.deltas.keys() <= self._by_name.keys()

    def place(self, adapters: Iterable[Adapter]) -> None:
        """Gives the adapters of a step slots, if they have none."""
        wanted = list(dict.fromkeys(adapters))
        if any(adapter not in self._slots for adapter in wanted):
            self._make_room(wanted)
        for adapter in wanted:
            if adapter not in self._slots:
                self._put(adapter, wanted)
            self._slots.move_to_end(adapter)

    def slot_of(self, adapter: Adapter) -> int:
        return self._slots[adapter]

    def _make_room(self, wanted: Sequence[Adapter]) -> None:
        """Allocates tensors anew if the adapters have other layers, higher ranks or are more."""
        every = [*self._slots, *(one for one in wanted if one not in self._slots)]
        slots, ranks = self._num_slots, self._ranks
        while slots < max(len(wanted), min(len(every), MOST_SLOTS)):
            slots = max(FIRST_SLOTS, 2 * slots)
        for adapter in every:
            while ranks < adapter.rank:
                ranks = max(LEAST_RANK, 2 * ranks)
        names = {name for adapter in every for name in adapter.deltas}
        used = [place for place in self._places if not names.isdisjoint(place.names)]
        grows = (slots, ranks) != (self._num_slots, self._ranks)
        new = [place for place in used if grows or place.down is None]
        if not new:
            return
        self._num_slots, self._ranks = slots, ranks
        for place in new:
            place.allocate(slots, ranks, next(iter(wanted[0].deltas.values())).down)
            for adapter, slot in self._slots.items():
                place.write(slot, adapter)
        self.on_changed()

    def _put(self, adapter: Adapter, wanted: Sequence[Adapter]) -> None:
        taken = set(self._slots.values())
        slot = next((slot for slot in range(self._num_slots) if slot not in taken), None)
        if slot is None:
            oldest = next(one for one in self._slots if one not in wanted)
            slot = self._slots.pop(oldest)
            self.on_replaced()
        for place in self._places:
            place.write(slot, adapter)
        self._slots[adapter] = slot
