"""Traces: a span per request, one per phase, in the client's trace."""

from __future__ import annotations

from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.testclient import TestClient

from kvboost.serve.app import create_app
from kvboost.serve.settings import ServerSettings
from kvboost.serve.tracing import Tracing, start_tracing
from support.tiny import make_engine, tiny_model

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def traced(app, exporter: InMemorySpanExporter) -> TestClient:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app.state.server.tracing = Tracing(provider, "fake")
    return TestClient(app, raise_server_exceptions=False)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


def test_a_real_answer_has_a_span_per_phase_within_its_own(exporter) -> None:
    model = tiny_model("llama", max_position_embeddings=512)
    with make_engine(model) as engine:
        app = create_app(engine, ServerSettings(served_names=("fake",)))
        with traced(app, exporter) as client:
            ids = list(range(3, 60))
            body = {"model": "fake", "prompt": ids, "max_tokens": 3, "temperature": 0}
            client.post("/v1/completions", json=body)
            exporter.clear()
            answer = client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    report = answer.json()["kvboost"]
    assert report["exact_tokens"] > 0
    spans = by_name(exporter)
    request = spans.pop("text_completion fake")
    assert request.kind is SpanKind.SERVER and request.parent is not None
    assert f"{request.parent.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    values = dict(request.attributes or {})
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.request.model"] == "fake"
    assert values["gen_ai.usage.input_tokens"] == len(ids)
    assert values["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert values["gen_ai.usage.cache_read.input_tokens"] == report["exact_tokens"]
    assert values["kvboost.tokens.computed"] == report["computed_tokens"]
    assert values["http.response.status_code"] == 200
    assert values["kvboost.request_id"] == answer.headers["x-request-id"]
    assert {"tokenize", "queue", "plan", "prefill", "decode"} <= set(spans)
    ordered = sorted(spans.values(), key=lambda span: span.start_time)
    for span in ordered:
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time
    for span, following in pairwise(ordered):
        assert abs(following.start_time - span.end_time) < 10_000  # rounded to nanoseconds each


def test_errors_and_vanished_answers_are_marked(fake, exporter) -> None:
    fake.pieces = ("Hel", RuntimeError("secret"))
    with traced(create_app(fake), exporter) as client:
        client.post("/v1/completions", json={"model": "fake", "prompt": "secret words"})
        client.post("/v1/completions", json={"model": "fake"})
        client.get("/nowhere/secret-path")
        client.get("/health")
    failed, refused, unknown = (
        span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER
    )
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "500"
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert refused.name == "POST /v1/completions" and "error.type" not in refused.attributes
    assert unknown.name == "GET"
    assert "secret words" not in "".join(span.to_json() for span in exporter.get_finished_spans())


def test_ollamas_answers_have_spans_of_their_operations(fake, exporter) -> None:
    with traced(create_app(fake), exporter) as client:
        client.post("/api/generate", json={"model": "fake", "prompt": "x", "raw": True})
        messages = [{"role": "user", "content": "x"}]
        client.post("/api/chat", json={"model": "fake", "messages": messages})
    names = [one.name for one in exporter.get_finished_spans() if one.kind is SpanKind.SERVER]
    assert names == ["text_completion fake", "chat fake"]


def test_a_client_that_samples_nothing_gets_no_spans(fake, exporter) -> None:
    with traced(create_app(fake), exporter) as client:
        body = {"model": "fake", "prompt": "words"}
        client.post("/v1/completions", json=body, headers={"traceparent": UNSAMPLED})
        assert exporter.get_finished_spans() == ()
        client.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
    assert any(span.parent is None for span in exporter.get_finished_spans())


def test_the_collector_gets_the_spans_when_the_server_stops(fake, monkeypatch) -> None:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    sent: list[tuple[str, ReadableSpan]] = []

    def export(self, spans):
        sent.extend((self._endpoint, span) for span in spans)
        return trace_exporter.SpanExportResult.SUCCESS

    monkeypatch.setattr(trace_exporter.OTLPSpanExporter, "export", export)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")
    settings = ServerSettings(otlp_endpoint="http://127.0.0.1:1")
    with TestClient(create_app(fake, settings)) as client:
        client.post("/v1/completions", json={"model": "fake", "prompt": "words"})
    endpoint, span = sent[-1]
    assert endpoint == "http://127.0.0.1:1/v1/traces"
    assert span.resource.attributes["service.name"] == "mine"
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES")
    start_tracing("http://127.0.0.1:1/own/path", "fake").close()


def test_without_an_endpoint_nothing_is_traced(client) -> None:
    assert client.app.state.server.tracing is None
