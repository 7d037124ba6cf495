"""The messages between vLLM's scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvboost.cache.tiers.stats import TierStats
from kvboost.integrations.vllm.commands import Order, Reply
from kvboost.integrations.vllm.planner import Hello, Keep, Load
from kvboost.tokens.hashing import ChunkKey


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """From a worker, at the start. Without ``hello`` nothing is reused, and its log says why."""

    hello: Hello | None


@dataclass
class Step(KVConnectorMetadata):
    """From the scheduler, with every step."""

    loads: list[Load] = field(default_factory=list)
    fetches: list[Load] = field(default_factory=list)
    """Loads whose chunks are to be held until vLLM has pages for them."""
    keeps: list[Keep] = field(default_factory=list)
    dropped: list[ChunkKey] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    is_busy: bool = False
    """Whether other requests compute in this step."""

    @property
    def has_work(self) -> bool:
        return bool(
            self.loads
            or self.fetches
            or self.keeps
            or self.dropped
            or self.cancelled
            or self.orders
        )


@dataclass
class Report(KVConnectorWorkerMetadata):
    """From a worker, after a step."""

    gone: set[ChunkKey] = field(default_factory=set)
    recomputed: dict[str, int] = field(default_factory=dict)
    """Moved rows that were computed again, by request."""
    measured: list[tuple[int, int, float]] = field(default_factory=list)
    """Forwards that were timed: rows, keys, seconds."""
    fetched: set[tuple[str, int]] = field(default_factory=set)
    """The names of loads whose chunks are held."""
    failed: set[tuple[str, int]] = field(default_factory=set)
    """The names of loads whose rows are lost."""
    tiers: dict[int, dict[str, TierStats]] = field(default_factory=dict)
    """The contents of the tiers by the worker's rank, if they have changed."""
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    """To orders, by request."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """The report of both. A chunk that one worker has lost is gone: each holds some heads of
        every chunk."""
        assert isinstance(other, Report)
        replies = {
            request_id: [*self.replies.get(request_id, ()), *other.replies.get(request_id, ())]
            for request_id in (*self.replies, *other.replies)
        }
        return Report(
            self.gone | other.gone,
            other.recomputed | self.recomputed,
            self.measured,
            self.fetched | other.fetched,
            self.failed | other.failed,
            self.tiers | other.tiers,
            replies,
        )
