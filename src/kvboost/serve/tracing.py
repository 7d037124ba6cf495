"""OpenTelemetry traces: a span for each request, and one for each phase of its answers.

The engine already measures its phases, so spans are made when a request has ended. Requests cost
nothing more while they run, and nothing at all without ``--otlp-endpoint``: then this module is not
imported. Attributes follow the semantic conventions for generative AI. No span has any text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

import kvboost
from kvboost.results import PHASES
from kvboost.serve.answers.choices import Choice
from kvboost.serve.answers.reports import RequestRecord, counts

_PATH = "/v1/traces"
_OPERATIONS = dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion")
_REQUEST_OPTIONS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_PARENT = (b"traceparent", b"tracestate")


class Tracing:
    """Makes spans of requests that have ended. A valid ``traceparent`` header makes them part of
    the client's trace."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvboost", kvboost.__version__)
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, scope: Scope, record: RequestRecord, status: int, began: float, ended: float
    ) -> None:
        """The spans of a request. ``began`` and ``ended`` are of ``time.perf_counter``; ``status``
        is 0 if the client had closed its connection."""
        # Spans have the time of day; everything else here has a clock that is never set back.
        offset = time.time_ns() - time.perf_counter_ns()
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _PARENT
        }
        span = self._tracer.start_span(
            self._name(scope, record),
            self._propagator.extract(headers),
            SpanKind.SERVER,
            _attributes(scope, status),
            start_time=_ns(began, offset),
        )
        if span.is_recording():
            if record.choices:
                span.set_attributes(self._answer_attributes(scope, record))
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            for choice in record.choices:
                self._phases(span, choice, offset)
        span.end(_ns(ended, offset))

    def close(self) -> None:
        """Sends what has not been sent. For a thread: the collector may be slow."""
        self._provider.shutdown()

    def _name(self, scope: Scope, record: RequestRecord) -> str:
        if record.choices:
            return f"{_operation(scope)} {self._model}"
        route = getattr(scope.get("route"), "path", "")
        return f"{scope['method']} {route}".strip()

    def _answer_attributes(self, scope: Scope, record: RequestRecord) -> dict[str, Any]:
        call, tokens = record.choices[0].call, record.tokens()
        choices = sorted(record.choices, key=lambda choice: choice.index)
        given: dict[str, Any] = {
            "gen_ai.operation.name": _operation(scope),
            "gen_ai.provider.name": "kvboost",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": call.body.longest_answer,
            "gen_ai.request.seed": call.body.seed,
            "gen_ai.request.choice.count": call.n if call.n > 1 else None,
            "gen_ai.response.finish_reasons": [choice.result.finish_reason for choice in choices],
            "gen_ai.usage.input_tokens": tokens["prompt"],
            "gen_ai.usage.output_tokens": tokens["generated"],
            "gen_ai.usage.cache_read.input_tokens": tokens["cached"],
            "kvboost.mode": call.mode,
        }
        given |= {f"gen_ai.request.{name}": call.options.get(name) for name in _REQUEST_OPTIONS}
        for name in ("exact", "approximate", "moved", "recomputed", "computed"):
            given[f"kvboost.tokens.{name}"] = tokens[name]
        if (ttft := record.ttft_ms) is not None:
            given["gen_ai.response.time_to_first_chunk"] = ttft / 1e3
        return {name: value for name, value in given.items() if value is not None}

    def _phases(self, parent: Span, choice: Choice, offset: int) -> None:
        """A span for each phase that took time. A phase that occurs several times is one span of
        its total time, so the spans are in order and end where the answer ended."""
        context = set_span_in_context(parent)
        rows = counts(choice.result.reuse)
        details: dict[str, dict[str, Any]] = {
            "plan": {f"kvboost.tokens.{name.removesuffix('_tokens')}": rows[name] for name in rows},
            "repair": {"kvboost.tokens.recomputed": rows["recomputed_tokens"]},
            "prefill": {"kvboost.tokens.computed": rows["computed_tokens"]},
            "decode": {"gen_ai.usage.output_tokens": len(choice.result.token_ids)},
        }
        for phase, start, end in phases(choice):
            span = self._tracer.start_span(
                phase,
                context,
                SpanKind.INTERNAL,
                {"kvboost.choice": choice.index, **details.get(phase, {})},
                start_time=_ns(start, offset),
            )
            span.end(_ns(end, offset))


def phases(choice: Choice) -> Iterator[tuple[str, float, float]]:
    """The phases of an answer that took time, with their beginnings and ends."""
    at = choice.received
    for phase in PHASES:
        seconds = getattr(choice.result.timings, f"{phase}_ms") / 1e3
        if phase == "tokenize":  # the server tokenizes before it calls the engine
            seconds += choice.submitted - choice.received
        if seconds > 0.0:
            yield phase, at, at + seconds
            at += seconds


def start_tracing(endpoint: str, model: str) -> Tracing:
    """Sends spans to the collector at ``endpoint`` in batches, from a thread. The environment
    variables of OpenTelemetry set the rest: service name, headers, sampler, batch sizes."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    named = Resource.create({"service.name": "kvboost", "service.version": kvboost.__version__})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return Tracing(provider, model)


def _attributes(scope: Scope, status: int) -> dict[str, Any]:
    given: dict[str, Any] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope.get("scheme", "http"),
        "kvboost.request_id": scope["state"]["request_id"],
    }
    if (tenant := scope["state"].get("tenant")) is not None:
        given["kvboost.tenant"] = tenant.name
    if status:
        given["http.response.status_code"] = status
    if not status or status >= 500:
        given["error.type"] = str(status or "client_gone")
    return given


def _operation(scope: Scope) -> str:
    return _OPERATIONS.get(scope["path"], "chat")


def _ns(seconds: float, offset: int) -> int:
    return int(seconds * 1e9) + offset
