"""Metrics for Prometheus: those of the server, and those that the engine counts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import kvboost

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server. Each has its own registry, so a process may have several."""

    def __init__(self, engine: kvboost.KVBoost) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        self._ttft = Times(
            "kvboost_ttft_seconds", "Time from a complete request to its first token", _FIRST
        )
        self._inter_token = Times(
            "kvboost_inter_token_seconds", "Time between two tokens of an answer", _NEXT
        )
        prompt = counter(
            "kvboost_prompt_tokens",
            "Prompt rows by source; moved: reused as cached, recomputed: moved and then computed "
            "again",
            ["source"],
        )
        self._generated = counter("kvboost_generated_tokens", "Generated tokens")
        self._answers = counter("kvboost_answers", "Answers by finish reason", ["finish_reason"])
        self._responses = counter("kvboost_responses", "HTTP responses by status", ["status"])
        told = "Fields of requests that this server does not know and has left out"
        self._ignored = counter("kvboost_ignored_fields", told)
        told = "Images that requests named by address, by what became of them"
        self._image_fetches = counter("kvboost_image_fetches", told, ["outcome"])
        for collector in (self._ttft, self._inter_token, _EngineCollector(engine)):
            registry.register(collector)
        sources = ("exact", "approximate", "moved", "recomputed", "computed")
        self._prompt = {source: prompt.labels(source) for source in sources}
        for reason in ("stop", "length", "cancelled", "timeout", "error"):
            self._answers.labels(reason)
        for outcome in ("fetched", "failed"):
            self._image_fetches.labels(outcome)

    def first_token(self, milliseconds: float) -> None:
        self._ttft.observe(milliseconds / 1e3)

    def tokens(self, seconds: float, count: int) -> None:
        """Counts ``count`` tokens that arrived ``seconds`` after the token before them."""
        if count:
            self._inter_token.observe(seconds / count, count)

    def answer(self, finish_reason: str, rows: Mapping[str, int], generated: int) -> None:
        self._answers.labels(finish_reason).inc()
        self._generated.inc(generated)
        recomputed = rows["recomputed_tokens"]
        for source, counter in self._prompt.items():
            counter.inc(rows[f"{source}_tokens"] - (recomputed if source == "moved" else 0))

    def response(self, status: int) -> None:
        """Counts a response; 0 if the client had closed its connection."""
        self._responses.labels(str(status or "gone")).inc()

    def ignored_fields(self, count: int) -> None:
        self._ignored.inc(count)

    def image_fetch(self, outcome: str) -> None:
        """Counts an image that was ``fetched``, or whose download ``failed``."""
        self._image_fetches.labels(outcome).inc()

    def text(self) -> bytes:
        """All metrics. For a thread: the engine may have to ask a remote tier."""
        return generate_latest(self._registry)


class Times(Collector):
    """A histogram of seconds. Every token of every answer is one: prometheus_client's own takes
    five times as long. One thread observes."""

    def __init__(self, name: str, help_: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._help)

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = [*zip(names, map(float, accumulate(self._counts)), strict=True)]
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family


_CACHE = {
    "evicted": "Chunks evicted from the last tier",
    "demoted": "Chunks moved down a tier",
    "promoted": "Chunks moved up a tier",
    "rejected": "Chunks that fitted no tier",
    "failed": "Chunks that could not be stored",
    "lost": "Chunks that could not be loaded when they were needed",
}
_DRAFTS = {
    "drafted_tokens": "Tokens that were drafted and run",
    "accepted_tokens": "Drafted tokens that are tokens of answers",
}
_SERVING = {
    "waiting": "Waiting requests",
    "running": "Running requests",
    "max_waiting": "Requests that may wait",
    "max_running": "Requests that may run at once",
    "kv_bytes": "Bytes of KV of running requests",
    "max_kv_bytes": "Bytes of KV that running requests may have",
    "shared_kv_bytes": "Bytes of KV that running requests share",
}
_LOOP = {
    "rejected": "Requests refused because the queue was full",
    "steps": "Forward passes of the serving loop",
    "loop_cpu_seconds": "Processor time of the thread that runs the serving loop",
}
_TIER = {
    "bytes": "Bytes in a tier",
    "max_bytes": "Bytes that a tier may hold",
    "chunks": "Chunks in a tier",
}
_HEALING = {
    "approximate_tokens": "Rows that requests left approximate",
    "healed_tokens": "Approximate rows that became exact",
    "computed_tokens": "Rows that healing computed",
    "seconds": "Time that healing took",
}
_READINGS = {
    "readings": "Documents read in one more context",
    "readings_dropped": "Documents not read in one more context, mostly for want of memory",
}
_AUDIT = {
    "mean_kl": "Mean KL of these answers' first tokens",
    "max_kl": "Largest KL of an answer",
    "token_agreement": "Share of their tokens whose likeliest choice was the same",
    "recompute_ratio": "Share of moved rows that is recomputed",
}
_EVENTS = {
    "messages": "Messages with KV events",
    "dropped": "Changes of the cache that were not announced, because too many waited",
    "failed": "Messages that could not be made or sent",
}
"""The counts of the engine, by the end of the metric's name, with their descriptions."""


class _EngineCollector(Collector):
    """Reads the engine's statistics whenever the metrics are read."""

    def __init__(self, engine: kvboost.KVBoost) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the registry asks at once, and no statistics are needed then

    def collect(self) -> Iterator[Metric]:
        cache, serving = self._engine.cache_stats(), self._engine.serving_stats()
        yield from _tiers(cache["tiers"])
        yield from _counters("cache_", _CACHE, cache)
        yield from _gauges("cache_", {"chunks": "Chunks in the cache"}, cache)
        if (events := cache.get("kv_events")) is not None:
            announced = {"blocks": "Blocks that are announced to routers"}
            yield from _gauges("kv_events_", announced, events)
            yield from _counters("kv_events_", _EVENTS, events)
        yield from _counters("", _DRAFTS, cache)
        yield from _healing(cache["healing"])
        audit = cache["audit"]  # no means until there is an answer
        compared = {"audited_answers": "Answers compared with exact ones"}
        yield from _counters("", compared, {"audited_answers": audit["audited"]})
        yield from _gauges("audit_", _AUDIT, audit)
        yield from _gauges("serving_", _SERVING, serving)
        yield from _counters("", _LOOP, {**serving, "loop_cpu_seconds": serving["cpu_seconds"]})
        yield _batch_sizes(serving["batch_sizes"])


def _counters(prefix: str, told: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[Metric]:
    for name, help_ in told.items():
        yield CounterMetricFamily(f"kvboost_{prefix}{name}", help_, value=values[name])


def _gauges(prefix: str, told: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[Metric]:
    """Gauges of the values that there are."""
    for name, help_ in told.items():
        if values.get(name) is not None:
            yield GaugeMetricFamily(f"kvboost_{prefix}{name}", help_, value=values[name])


def _tiers(tiers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for name, help_ in _TIER.items():
        gauge = GaugeMetricFamily(f"kvboost_tier_{name}", help_, labels=["tier"])
        for tier, stats in tiers.items():
            if stats.get(name) is not None:
                gauge.add_metric([tier], stats[name])
        yield gauge
    hits = CounterMetricFamily("kvboost_tier_hits", "Chunks loaded from a tier", labels=["tier"])
    faults = CounterMetricFamily(
        "kvboost_tier_faults", "Failures of a tier; each counts as a miss", labels=["tier", "fault"]
    )
    for tier, stats in tiers.items():
        if "hits" in stats:
            hits.add_metric([tier], stats["hits"])
        for fault, count in stats.get("faults", {}).items():
            faults.add_metric([tier, fault], count)
    yield hits
    yield faults


def _healing(healing: Mapping[str, Any]) -> Iterator[Metric]:
    """Approximate rows, and what became of them."""
    yield from _gauges("healing_", {"waiting": "Conversations to be healed"}, healing)
    yield from _counters("healing_", _HEALING, healing)
    waiting = {"readings_waiting": "Documents to be read in one more context"}
    yield from _gauges("", waiting, healing)
    yield from _counters("", _READINGS, healing)
    ended = CounterMetricFamily(
        "kvboost_healing_conversations", "Conversations that left the queue", labels=["status"]
    )
    for status in ("healed", "replaced", "dropped", "failed"):
        ended.add_metric([status], healing[status])
    yield ended


def _batch_sizes(steps: Mapping[int, int]) -> Metric:
    """A histogram of the number of ``steps`` by batch size."""
    buckets = [
        (str(float(bound)), float(sum(n for size, n in steps.items() if size <= bound)))
        for bound in _BATCH
    ]
    buckets.append(("+Inf", float(sum(steps.values()))))
    family = HistogramMetricFamily("kvboost_batch_size", "Requests in one forward pass")
    family.add_metric([], buckets, sum_value=float(sum(size * n for size, n in steps.items())))
    return family
