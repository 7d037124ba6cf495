"""The counters of the store and its tiers. ``as_dict`` gives what ``cache_stats()`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TierStats:
    """A tier of this machine."""

    chunks: int
    nbytes: int
    max_bytes: int
    hits: int
    faults: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            "chunks": self.chunks,
            "bytes": self.nbytes,
            "max_bytes": self.max_bytes,
            "hits": self.hits,
            "faults": dict(self.faults),
        }


@dataclass(frozen=True)
class RemoteStats:
    """A store that several machines share."""

    state: str
    """The breaker's."""
    hits: int
    misses: int
    puts: int
    faults: Mapping[str, int]
    nbytes: int
    searches: int = 0
    """The number of times it was asked for text at any position."""
    found: int = 0
    """Chunks that these searches found."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "hits": self.hits,
            "misses": self.misses,
            "puts": self.puts,
            "searches": self.searches,
            "found": self.found,
            "faults": dict(self.faults),
            "bytes": self.nbytes,
        }


@dataclass(frozen=True)
class WriterStats:
    """Chunks that wait to be written to slower tiers."""

    pending: int
    waiting_bytes: int
    """Of pending chunks that RAM has already evicted."""
    max_waiting_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "owed": self.pending,
            "waiting_bytes": self.waiting_bytes,
            "max_waiting_bytes": self.max_waiting_bytes,
        }


@dataclass(frozen=True)
class MoveStats:
    """The number of chunks that moved between tiers or left them."""

    evicted: int = 0
    """Left the last tier."""
    demoted: int = 0
    """Left a tier, but are still in a slower one."""
    promoted: int = 0
    unwritten: int = 0
    """Evicted from RAM before they could be written."""
    rejected: int = 0
    """Had no room."""
    failed: int = 0
    lost: int = 0
    """Found, and then not there any more."""


@dataclass(frozen=True)
class StoreStats:
    chunks: int
    in_use: int
    """By requests that copy them."""
    pinned: int
    """By the user."""
    pinned_bytes: int
    max_pinned_bytes: int | None
    admitted: int
    tiers: Mapping[str, TierStats]
    remote: RemoteStats | None = None
    writing: WriterStats | None = None
    moves: MoveStats = field(default_factory=MoveStats)

    def as_dict(self) -> dict[str, Any]:
        tiers = {name: tier.as_dict() for name, tier in self.tiers.items()}
        if self.remote is not None:
            tiers["remote"] = self.remote.as_dict()
        if self.writing is not None:
            tiers["writing"] = self.writing.as_dict()
        return {
            "chunks": self.chunks,
            "in_use": self.in_use,
            "pinned": self.pinned,
            "pinned_bytes": self.pinned_bytes,
            "max_pinned_bytes": self.max_pinned_bytes,
            "admitted": self.admitted,
            "tiers": tiers,
            **asdict(self.moves),
        }
