"""What it costs to answer over passages that were read before, in KVShareArena's measures."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost import KVBoost, SpanKind
from kvboost.results import ReuseReport

ALL_CHUNKS = 1_000_000


@dataclass(frozen=True)
class PayloadCost:
    """What the passages of one prompt cost. A layer-token is one token in one layer."""

    recomputed_layer_tokens: int
    """Repair with its probes, and rows of passages that were not in the cache."""
    dense_layer_tokens: int
    """A full prefill of the passages."""
    kv_bytes: int
    """The KV of the passages, as the cache holds it."""
    bytes_per_token: float


def payload_cost(engine: KVBoost, reuse: ReuseReport, start: int, end: int) -> PayloadCost:
    """The cost of a prompt whose rows ``[start, end)`` are passages."""
    layers, stored = engine.facts()["layers"], engine.chunks(ALL_CHUNKS)
    new = sum(
        max(0, min(span.end, end) - max(span.start, start))
        for span in reuse.spans
        if span.kind is SpanKind.COMPUTE
    )
    tokens = sum(one["tokens"] for one in stored)
    row_bytes = sum(one["bytes"] for one in stored) / max(1, tokens)
    return PayloadCost(
        recomputed_layer_tokens=round(layers * (reuse.charged_tokens + new)),
        dense_layer_tokens=layers * (end - start),
        kv_bytes=round(row_bytes * (end - start)),
        bytes_per_token=row_bytes,
    )
