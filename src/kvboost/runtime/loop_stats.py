"""What a loop counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LoopStats:
    """The loop at one moment, and its totals."""

    waiting: int
    running: int
    max_waiting: int
    max_running: int
    kv_bytes: int
    max_kv_bytes: int
    shared_kv_bytes: int
    """What the running requests would need in addition if they shared no rows."""
    steps: int
    steps_between_parts: int
    """Those of running answers between two parts of another forward."""
    rows: int
    batch_sizes: dict[int, int]
    finished: dict[str, int]
    rejected: int
    cpu_seconds: float
    """Processor time of the loop's thread until the end of its last step."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
