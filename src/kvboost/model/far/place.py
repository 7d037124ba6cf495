"""Where far rows are, by the device of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvboost.model.far.costs import FarCosts
from kvboost.model.far.host import HostAttention
from kvboost.model.far.host_kv import HostFarKV
from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import FarMemory, FileMemory, HostMemory
from kvboost.model.far.rows import FarAttention
from kvboost.model.far.slots import SLOTS, CudaTransfers, Slots
from kvboost.model.far.streamed import StreamedAttention
from kvboost.model.kv import KVShape

LEAST_SLOT_ROWS = 16
SLOT_BYTES = 128 * 1024**2
SLOT_SHARE = 16
"""A slot takes at most this part of near memory."""


@dataclass(frozen=True)
class FarPlace:
    """``memory`` allocates so many far rows; ``attention`` is called once, for the first request,
    and takes ``near_bytes`` of near memory."""

    kv: type[FarKV]
    memory: Callable[[int], FarMemory]
    attention: Callable[[], FarAttention]
    near_bytes: int = 0


def in_file(shape: KVShape, folder: Path | None) -> FarPlace:
    """A file, for a model on the CPU."""
    memory = partial(FileMemory, shape, folder=folder)
    return FarPlace(FarKV, memory, partial(HostAttention, shape))


def on_host(shape: KVShape, near_bytes: int) -> FarPlace:
    """The host's memory, for a model on a GPU. Slots take some of ``near_bytes``."""
    layer_bytes = shape.row_bytes // shape.num_layers
    slot = min(SLOT_BYTES, near_bytes // SLOT_SHARE)
    rows = max(LEAST_SLOT_ROWS, slot // layer_bytes)

    def attention() -> FarAttention:
        costs = FarCosts()
        slots = Slots(shape, rows, CudaTransfers(shape.device, costs))
        return StreamedAttention(slots, costs, HostAttention(shape))

    return FarPlace(HostFarKV, partial(HostMemory, shape), attention, SLOTS * rows * layer_bytes)
