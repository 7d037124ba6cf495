"""The counters of the connector: the rows that were loaded, how long that took, and what is stored.

It is in vLLM's scheduler process, knows nothing of vLLM, and is not thread-safe.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.cache.tiers.stats import TierStats
from kvboost.integrations.vllm.planner import Load

SOURCES = ("exact", "moved", "recomputed", "computed")
"""Of the rows of a load. ``moved`` were used as they were stored, ``recomputed`` are moved ones
that were computed again, and ``computed`` were not known."""
OUTCOMES = ("loaded", "failed")
PUT_OFF = ("kept", "dropped")
"""The outcomes of requests whose rows are to be kept later."""
TIER_FIGURES = ("bytes", "max_bytes", "chunks")


def usage(load: Load, recomputed: int) -> dict[str, int]:
    """The report on a request in its answer."""
    return {
        "exact_tokens": sum(hit.num_tokens for hit in load.plan.in_place),
        "moved_tokens": load.plan.num_moved,
        "recomputed_tokens": recomputed,
    }


class Tally:
    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._seconds = 0.0
        self._workers: dict[int, dict[str, dict[str, Any]]] = {}
        self._tiers: dict[str, dict[str, int]] = {}
        self._new: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    def start(self, request_id: str) -> None:
        """A load was sent to the workers."""
        self._started[request_id] = time.perf_counter()

    def cancel(self, request_id: str) -> None:
        self._started.pop(request_id, None)

    def finish(self, load: Load, recomputed: int, *, failed: bool = False) -> None:
        """The rows of ``load`` are in their pages; or they are not, and vLLM computes them."""
        seconds = time.perf_counter() - self._started.pop(load.request_id, time.perf_counter())
        tokens: Counter[str] = Counter()
        if not failed:
            of_request = usage(load, recomputed)
            tokens["exact"] = of_request["exact_tokens"]
            tokens["moved"] = of_request["moved_tokens"] - recomputed
            tokens["recomputed"] = recomputed
            tokens["computed"] = sum(len(rows) for rows in load.computed())
            self._seconds += seconds
        loads = Counter({"failed" if failed else "loaded": 1})
        self._tokens.update(tokens)
        self._loads.update(loads)
        new = {"tokens": dict(+tokens), "loads": dict(loads)}
        merge(self._new, new if failed else {**new, "seconds": [seconds]})

    def put_off(self, outcome: str) -> None:
        """A request whose rows were to be kept later has been ``kept`` or ``dropped``."""
        counted = self._new.setdefault("put_off", {})
        counted[outcome] = counted.get(outcome, 0) + 1

    def hear(self, tiers: Mapping[int, Mapping[str, TierStats]]) -> None:
        """The present contents of some workers' tiers, by the worker's rank."""
        if tiers:
            self._workers |= {
                rank: {name: tier.as_dict() for name, tier in of_worker.items()}
                for rank, of_worker in tiers.items()
            }
            self._tiers = sum_tiers(list(self._workers.values()), TIER_FIGURES)

    def take(self, chunks: int) -> dict[str, Any] | None:
        """The changes since the last call, in the form that :func:`merge` takes; None if
        nothing has. ``chunks`` are stored now."""
        now = {"chunks": chunks, "tiers": self._tiers}
        if not self._new and now == self._told:
            return None
        new, self._new = self._new, {}
        new |= {name: value for name, value in now.items() if self._told.get(name) != value}
        self._told = now
        return new

    def totals(self) -> dict[str, Any]:
        """Everything since the start."""
        return {
            "prompt_tokens": {source: self._tokens[source] for source in SOURCES},
            "loads": {outcome: self._loads[outcome] for outcome in OUTCOMES},
            "load_seconds": round(self._seconds, 6),
        }


def sum_tiers(
    of_workers: Sequence[Mapping[str, Mapping[str, Any]]], figures: Sequence[str]
) -> dict[str, dict[str, int]]:
    """The ``figures`` of each tier over all workers. Of chunks, every worker holds its heads, so
    their number is that of the worker that has most."""
    sums: dict[str, dict[str, int]] = {}
    for tiers in of_workers:
        for name, tier in tiers.items():
            sums.setdefault(name, {})
            for figure in figures:
                if figure in tier:
                    pair = (sums[name].get(figure, 0), tier[figure])
                    sums[name][figure] = max(pair) if figure == "chunks" else sum(pair)
    return sums


def merge(data: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Adds to ``data`` what was counted ``later``. What is held is replaced."""
    for name in ("tokens", "loads", "put_off"):
        if counted := later.get(name):
            data[name] = dict(Counter(data.get(name, {})) + Counter(counted))
    if seconds := later.get("seconds"):
        data["seconds"] = [*data.get("seconds", ()), *seconds]
    data |= {name: later[name] for name in ("chunks", "tiers") if name in later}
