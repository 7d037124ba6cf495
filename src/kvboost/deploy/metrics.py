"""Metrics of the router for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvboost.deploy.router import Choice, Router
from kvboost.deploy.upstreams import UP

REASONS = ("beginning", "content", "load", "new", "only", "turn")
_REPORTED = {"exact": "beginning", "moved": "elsewhere", "computed": "new"}
"""The headers of KVBoost's answers, by what the router calls these tokens."""


class RouteMetrics:
    """The metrics of one router."""

    def __init__(self, router: Router, states: Callable[[], Mapping[str, str]]) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        self._responses = counter(
            "kvboost_route_requests",
            "Requests by the upstream that answered them and the status; without an upstream the "
            "router answered",
            ["upstream", "status"],
        )
        told = "Requests by what decided"
        self._routed = counter("kvboost_route_decisions", told, ["reason"])
        told = "Attempts after which a request was sent to another upstream"
        self._retries = counter("kvboost_route_retries", told, ["upstream", "cause"])
        told = "Answers that an upstream did not finish"
        self._lost = counter("kvboost_route_lost", told, ["upstream"])
        told = "Prompt tokens, estimated, by what the chosen upstream was expected to know of them"
        self._expected = counter("kvboost_route_expected_tokens", told, ["kind"])
        self._reported = counter(
            "kvboost_route_reported_tokens",
            "Prompt tokens by what KVBoost's answers say was done with them; elsewhere includes "
            "moved tokens that were computed again",
            ["kind"],
        )
        registry.register(_Upstreams(router, states))
        for reason in REASONS:
            self._routed.labels(reason)
        for kind in _REPORTED.values():
            self._expected.labels(kind)
            self._reported.labels(kind)

    def routed(self, choice: Choice) -> None:
        self._routed.labels(choice.reason).inc()
        for kind in _REPORTED.values():
            self._expected.labels(kind).inc(getattr(choice.expected, kind))

    def retry(self, upstream: str, cause: str) -> None:
        self._retries.labels(upstream, cause).inc()

    def lost(self, upstream: str) -> None:
        self._lost.labels(upstream).inc()

    def answered(self, upstream: str, status: int) -> None:
        """Counts a response; an empty ``upstream`` is the router itself."""
        self._responses.labels(upstream, str(status)).inc()

    def reported(self, headers: Mapping[str, str]) -> None:
        """Counts what an answer of KVBoost says about its prompt."""
        for name, kind in _REPORTED.items():
            self._reported.labels(kind).inc(reported_tokens(headers, name) or 0)

    def text(self) -> bytes:
        return generate_latest(self._registry)


def reported_tokens(headers: Mapping[str, str], name: str) -> int | None:
    """The prompt tokens of a kind that an answer of KVBoost reports; None if it does not."""
    value = headers.get(f"x-kvboost-{name}-tokens", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


class _Upstreams(Collector):
    """Reads the state of every upstream whenever the metrics are read."""

    def __init__(self, router: Router, states: Callable[[], Mapping[str, str]]) -> None:
        self._router = router
        self._states = states

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        states, known = self._states(), "Tokens of text an upstream is thought to know"
        for name, help_, value in (
            ("upstream_up", "Whether an upstream takes requests", lambda one: states[one] == UP),
            ("open_requests", "Requests without a complete answer", self._router.open_requests),
            ("known_tokens", known, lambda one: self._router.known(one).tokens),
        ):
            gauge = GaugeMetricFamily(f"kvboost_route_{name}", help_, labels=["upstream"])
            for upstream in states:
                gauge.add_metric([upstream], float(value(upstream)))
            yield gauge
