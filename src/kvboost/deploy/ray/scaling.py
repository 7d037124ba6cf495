"""When a replica should be added or removed. Pure; Ray calls it with what replicas report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

KV_FULL = 0.85
"""The share of the KV of running requests at which a replica is as good as full."""
KV_IDLE = 0.2


class ScalingContext(Protocol):
    """The part of Ray's ``AutoscalingContext`` that we read."""

    current_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


def autoscaling_stats(serving: Mapping[str, Any]) -> dict[str, float]:
    """The report of a replica: how full it is, and how many requests wait for room."""
    most = serving.get("max_kv_bytes") or 0
    used = serving["kv_bytes"] / most if most else 0.0
    return {"kv_used": float(used), "waiting": float(serving["waiting"])}


def kv_pressure(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """One replica more while all are full or let requests wait; one less while all are idle. Text
    is read on the replica that knows it, so one full replica among idle ones is no reason."""
    reported = context.aggregated_metrics or {}
    used, waiting = (list(reported.get(name, {}).values()) for name in ("kv_used", "waiting"))
    change = 0
    if _all(value > KV_FULL for value in used) or _all(value >= 1 for value in waiting):
        change = 1
    elif _all(value < KV_IDLE for value in used) and not any(waiting):
        change = -1
    wanted = context.current_num_replicas + change
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}


def _all(conditions: Iterable[bool]) -> bool:
    """Whether all are true, and there is one."""
    held = list(conditions)
    return bool(held) and all(held)
