"""Which layers stay on the device, and what else shares its memory with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.config import EngineConfig, format_bytes
from kvboost.errors import ConfigError
from kvboost.model.streaming.slabs import aligned

NUM_SLOTS = 2
"""Layers on their way: one is computed while the next is copied. A third gains nothing, because
copies take longer than the computation they hide."""
KV_SHARE, ROWS_SHARE = 1 / 8, 1 / 16
"""Of the budget: for the KV of running requests, unless ``max_kv_bytes`` says otherwise, and for
what the rows of a forward need between the weights."""
OTHER_BYTES = 96 << 20
"""Logits, sampling, and what the memory allocator loses."""
GRAPHS_SHARE = 0.05
"""Of the budget: for CUDA graphs, which there are if nothing is streamed."""
LEAST_ROWS, MOST_ROWS = 128, 16384


@dataclass(frozen=True)
class DeviceBudget:
    """The budget of an engine on the device's memory and, for streamed layers, of the host's."""

    device_bytes: int
    host_bytes: int | None = None
    """None: what is free when a model is loaded."""
    kv_bytes: int | None = None
    """For running requests; None: a share of ``device_bytes``."""
    cache_bytes: int = 0
    """For chunks."""

    @classmethod
    def of(cls, config: EngineConfig) -> DeviceBudget | None:
        """The budget that a config sets; None if it sets none."""
        if config.device_memory is None:
            return None
        return cls(
            config.device_memory,
            config.host_memory,
            config.max_kv_bytes,
            config.gpu_cache_bytes or 0,
        )


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model on the device."""

    layers: tuple[int, ...]
    others: int
    """Embeddings, norms, the output head: all that is no decoder layer."""
    embedding: int
    """Of these, the embedding if it can stay on the host."""
    per_row: int
    """The most bytes that a row of a forward needs between the weights of a layer."""
    scratch: int = 0
    """The bytes that kernels need for one weight."""


@dataclass(frozen=True)
class LayerPlan:
    """Where each decoder layer has its weights."""

    resident: frozenset[int]
    """Always on the device."""
    in_memory: frozenset[int]
    """Streamed from host memory."""
    on_disk: frozenset[int]
    """Streamed from a file."""
    kv_bytes: int
    most_rows: int
    """Rows of one forward."""

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(sorted(self.in_memory | self.on_disk))


def make_plan(sizes: ModelSizes, budget: DeviceBudget, host_bytes: int) -> LayerPlan:
    """As many layers as fit stay on the device. Raises ConfigError if not even the slots of a model
    that is streamed whole do."""
    total = budget.device_bytes
    rows_bytes = int(total * ROWS_SHARE)
    most_rows = rows_bytes // max(1, sizes.per_row)
    most_rows = max(LEAST_ROWS, min(MOST_ROWS, most_rows // 128 * 128))
    kv_bytes = int(total * KV_SHARE) if budget.kv_bytes is None else budget.kv_bytes
    reserve = max(rows_bytes, most_rows * sizes.per_row) + sizes.scratch + OTHER_BYTES
    fixed = sizes.others + reserve + budget.cache_bytes
    number = len(sizes.layers)
    every = frozenset(range(number))
    left = total - fixed - sum(sizes.layers) - int(total * GRAPHS_SHARE)
    if kv_bytes <= left:
        kv_bytes = left if budget.kv_bytes is None else kv_bytes
        return LayerPlan(every, frozenset(), frozenset(), kv_bytes, most_rows)
    slots = NUM_SLOTS * aligned(max(sizes.layers))
    fixed -= sizes.embedding
    left = total - fixed - kv_bytes - slots
    if left < 0:
        raise ConfigError(_too_little(sizes, budget, total - left, kv_bytes, slots, reserve))
    num_resident = max(
        count for count in range(number) if _bytes_of(sizes.layers, spread(count, number)) <= left
    )
    resident = frozenset(spread(num_resident, number))
    streamed = sorted(every - resident)
    num_kept = max(
        count
        for count in range(len(streamed) + 1)
        if _bytes_of(sizes.layers, [streamed[at] for at in spread(count, len(streamed))])
        <= host_bytes
    )
    kept = frozenset(streamed[at] for at in spread(num_kept, len(streamed)))
    return LayerPlan(resident, kept, every - resident - kept, kv_bytes, most_rows)


def spread(count: int, number: int) -> list[int]:
    """``count`` of the first ``number`` numbers, spread evenly: while resident layers compute, the
    next streamed one is copied."""
    return [(2 * at + 1) * number // (2 * count) for at in range(count)]


def _bytes_of(layers: Sequence[int], chosen: Sequence[int]) -> int:
    return sum(aligned(layers[number]) for number in chosen)


def _too_little(
    sizes: ModelSizes, budget: DeviceBudget, needed: int, kv_bytes: int, slots: int, reserve: int
) -> str:
    parts = {
        "weights that are not streamed": sizes.others - sizes.embedding,
        f"{NUM_SLOTS} layers on their way": slots,
        "the KV of running requests": kv_bytes,
        "gpu_cache_bytes": budget.cache_bytes,
        "rows of a forward": reserve,
    }
    listing = ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts.items() if size)
    return (
        f"device_memory={format_bytes(budget.device_bytes)} is too little for this model even if "
        f"all its layers are streamed: it needs {format_bytes(needed)}: {listing}"
    )
