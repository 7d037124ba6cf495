"""Where far rows are, by the device of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.coded_kv import LEAST_NEAR_ROWS, CodedKV
from kvboost.model.far.codes import BLOCK, CodedMemory, CodeLayout, RowCodec, coded_bytes
from kvboost.model.far.costs import FarCosts
from kvboost.model.far.host import HostAttention
from kvboost.model.far.host_kv import HostFarKV
from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import FarMemory, FileMemory, HostMemory
from kvboost.model.far.rows import FarAttention
from kvboost.model.far.slots import SLOTS, CudaTransfers, Slots
from kvboost.model.far.streamed import StreamedAttention

LEAST_SLOT_ROWS = 16
SLOT_BYTES = 128 * 1024**2
SLOT_SHARE = 16
"""A slot takes at most this part of near memory."""


@dataclass(frozen=True)
class FarPlace:
    """``memory`` allocates so many far rows, which take ``far_bytes``; ``attention`` is called
    once, for the first request, and takes ``near_bytes`` of near memory."""

    kv: Callable[..., FarKV]
    memory: Callable[[int], FarMemory | CodedMemory]
    far_bytes: Callable[[int], int]
    attention: Callable[[], FarAttention]
    near_bytes: int = 0
    least_near_rows: int = 64


def in_file(shape: KVShape, folder: Path | None) -> FarPlace:
    """A file, for a model on the CPU."""
    memory = partial(FileMemory, shape, folder=folder)
    return FarPlace(FarKV, memory, shape.row_bytes.__mul__, partial(HostAttention, shape))


def on_host(shape: KVShape, near_bytes: int, codec: RowCodec | None = None) -> FarPlace:
    """The host's memory, for a model on a GPU; rows in fewer bits with a ``codec``. Slots take some
    of ``near_bytes``."""
    if codec is not None:
        return _coded(shape, near_bytes, codec)
    layer_bytes = shape.row_bytes // shape.num_layers
    slot = min(SLOT_BYTES, near_bytes // SLOT_SHARE)
    rows = max(LEAST_SLOT_ROWS, slot // layer_bytes)

    def attention() -> FarAttention:
        costs = FarCosts()
        slots = Slots(shape, rows, CudaTransfers(shape.device, costs))
        return StreamedAttention(slots, costs, HostAttention(shape))

    memory, far_bytes = partial(HostMemory, shape), shape.row_bytes.__mul__
    return FarPlace(HostFarKV, memory, far_bytes, attention, SLOTS * rows * layer_bytes)


def _coded(shape: KVShape, near_bytes: int, codec: RowCodec) -> FarPlace:
    """All rows are streamed: the host would have to decode what it attends to."""
    layer_bytes = shape.row_bytes // shape.num_layers
    # A part is copied in codes, and becomes as large as near rows, and twice that meanwhile.
    rows = min(SLOT_BYTES, near_bytes // SLOT_SHARE) // layer_bytes // BLOCK * BLOCK
    rows = max(BLOCK, rows)
    slot_bytes = rows // BLOCK * CodeLayout(shape, codec).block_bytes

    def attention() -> FarAttention:
        costs = FarCosts()
        slots = Slots(shape, rows, CudaTransfers(shape.device, costs), slot_bytes)
        return StreamedAttention(slots, costs, None)

    return FarPlace(
        CodedKV,
        partial(CodedMemory, shape, codec=codec),
        partial(coded_bytes, shape, codec),
        attention,
        SLOTS * slot_bytes + 3 * rows * layer_bytes,
        LEAST_NEAR_ROWS,
    )
