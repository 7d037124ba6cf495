"""The connector's figures on vLLM's ``/metrics`` and in its log."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvboost.integrations.vllm.tally import OUTCOMES, PUT_OFF, SOURCES, merge

PREFIX = "vllm:kvboost_"
"""vLLM removes metrics from the registry by their prefix when an engine is made anew."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_COUNTERS = {
    "tokens": (
        "prompt_tokens",
        "Prompt rows that KVBoost put into pages, by source; moved: used as stored, recomputed: "
        "moved and then computed again, computed: not known",
        "source",
        SOURCES,
    ),
    "loads": (
        "loads",
        "Requests that KVBoost loaded rows for; failed: vLLM computed them",
        "outcome",
        OUTCOMES,
    ),
    "put_off": (
        "put_off",
        "Requests whose rows were to be kept later, because many ran and none loaded anything; "
        "dropped: vLLM needed their pages first, or others came",
        "outcome",
        PUT_OFF,
    ),
}
"""By the name in what :meth:`.Tally.take` gives: a name, what it tells, a label and its values."""
_TIERS = {
    "bytes": "Bytes in a tier, over all workers",
    "max_bytes": "Bytes that a tier may hold, over all workers",
    "chunks": "Chunks in a tier",
}


class Stats(KVConnectorStats):
    """On its way from the scheduler to the API server. ``data`` is what :meth:`.Tally.take`
    gives."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        tokens, loads = self.data.get("tokens", {}), self.data.get("loads", {})
        later = self.data.get("put_off", {})
        told: dict[str, int | float] = {f"kvboost {name} tokens": tokens[name] for name in tokens}
        told |= {f"kvboost {name} loads": loads[name] for name in loads}
        told |= {f"kvboost put off and {name} requests": later[name] for name in later}
        if seconds := self.data.get("seconds"):
            told["kvboost seconds of a load"] = round(sum(seconds) / len(seconds), 4)
        if "chunks" in self.data:
            told["kvboost chunks"] = self.data["chunks"]
        return told


class Metrics(KVConnectorPromMetrics):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        names = list(self._labelnames)
        self._counters = {
            counted: self._counter_cls(
                name=f"{PREFIX}{name}", documentation=told, labelnames=[*names, label]
            )
            for counted, (name, told, label, _) in _COUNTERS.items()
        }
        self._seconds = self._histogram_cls(
            name=f"{PREFIX}load_seconds",
            documentation="Time from the plan of a load until its rows are in pages",
            buckets=_SECONDS,
            labelnames=names,
        )
        self._chunks = self._gauge(
            f"{PREFIX}cache_chunks", "Chunks in the cache, over all tiers", names
        )
        self._tiers = {
            name: self._gauge(f"{PREFIX}tier_{name}", told, [*names, "tier"])
            for name, told in _TIERS.items()
        }
        for values in self.per_engine_labelvalues.values():
            for counted, (*_, kinds) in _COUNTERS.items():
                for kind in kinds:
                    self._counters[counted].labels(*values, kind)
            self._seconds.labels(*values)
            self._chunks.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for counted, counter in self._counters.items():
            for kind, number in transfer_stats_data.get(counted, {}).items():
                counter.labels(*values, kind).inc(number)
        for seconds in transfer_stats_data.get("seconds", ()):
            self._seconds.labels(*values).observe(seconds)
        if "chunks" in transfer_stats_data:
            self._chunks.labels(*values).set(transfer_stats_data["chunks"])
        for tier, figures in transfer_stats_data.get("tiers", {}).items():
            for name, gauge in self._tiers.items():
                gauge.labels(*values, tier).set(figures[name])

    def _gauge(self, name: str, documentation: str, labelnames: list[str]) -> Any:
        return self._gauge_cls(
            name=name,
            documentation=documentation,
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
