"""Metrics, read with Prometheus' own parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvboost.serve.metrics import Times
from kvboost.serve.settings import ApiKey

KEYS = (ApiKey("ann", "k-ann"), ApiKey("root", "k-root", is_admin=True))
COMPLETION = {"model": "fake", "prompt": "hello"}


def scrape(client) -> dict[tuple[str, ...], float]:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_answers_are_counted_by_finish_reason_and_source_of_rows(client, fake) -> None:
    client.post("/v1/completions", json=COMPLETION)
    client.post("/v1/completions", json={**COMPLETION, "n": 2, "stream": True})
    fake.finish_reason = "timeout"
    client.post("/v1/completions", json=COMPLETION)
    seen = scrape(client)
    assert seen["kvboost_answers_total", "stop"] == 3
    assert seen["kvboost_answers_total", "timeout"] == 1
    assert seen["kvboost_answers_total", "cancelled"] == 0
    assert seen["kvboost_prompt_tokens_total", "computed"] == 4 * len("hello")
    assert seen["kvboost_prompt_tokens_total", "exact"] == 0
    assert seen["kvboost_generated_tokens_total",] == 8
    assert seen["kvboost_ttft_seconds_count",] == 4
    assert seen["kvboost_inter_token_seconds_count",] == 4
    assert seen["kvboost_responses_total", "200"] == 2
    assert seen["kvboost_responses_total", "504"] == 1


def test_the_counts_of_the_engine_are_shown(client) -> None:
    seen = scrape(client)
    assert seen["kvboost_rejected_total",] == 5
    assert seen["kvboost_loop_cpu_seconds_total",] == 2.5
    assert seen["kvboost_serving_max_running",] == 9
    assert seen["kvboost_batch_size_bucket", "1.0"] == 3
    assert seen["kvboost_batch_size_bucket", "4.0"] == 5
    assert seen["kvboost_batch_size_sum",] == 11
    assert seen["kvboost_cache_evicted_total",] == 0
    assert seen["kvboost_drafted_tokens_total",] == 40
    assert seen["kvboost_accepted_tokens_total",] == 30
    assert seen["kvboost_healing_healed_tokens_total",] == 0
    assert seen["kvboost_healing_conversations_total", "dropped"] == 0
    assert seen["kvboost_healing_conversations_total", "replaced"] == 0
    for name in ("readings_waiting", "readings_total", "readings_dropped_total"):
        assert seen[f"kvboost_{name}",] == 0
    assert seen["kvboost_audit_recompute_ratio",] == 0.15
    assert ("kvboost_audit_mean_kl",) not in seen  # no answer was compared


def test_servers_in_one_process_have_separate_metrics(serve_fake) -> None:
    one, other = serve_fake(), serve_fake()
    one.post("/v1/completions", json=COMPLETION)
    assert scrape(one)["kvboost_answers_total", "stop"] == 1
    assert scrape(other)["kvboost_answers_total", "stop"] == 0


def test_metrics_can_need_an_administrators_key(serve_fake) -> None:
    """They show when and how much other tenants read."""
    client = serve_fake(keys=KEYS, metrics="key")
    for key, status in ((None, 401), ("k-no", 401), ("k-ann", 403), ("k-root", 200)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert client.get("/metrics", headers=headers).status_code == status
    operation = client.get("/openapi.json").json()["paths"]["/metrics"]["get"]
    assert operation["security"] == [{"key": []}] and "401" in operation["responses"]


def test_metrics_can_be_off(serve_fake) -> None:
    client = serve_fake(metrics="off")
    refused = client.get("/metrics")
    assert refused.status_code == 404 and "GET /health, GET /ready" in refused.text
    assert "GET /metrics" not in refused.text


@given(st.lists(st.sampled_from([0.0, 0.001, 0.5, 1.0, 1.5, 70.0])))
def test_times_are_shown_as_prometheus_shows_them(observed: list[float]) -> None:
    bounds = (0.001, 0.5, 1.0)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = Times("waits_seconds", "How long it takes", bounds)
    ours.register(times)
    histogram = Histogram("waits_seconds", "How long it takes", registry=theirs, buckets=bounds)
    for seconds in observed:
        times.observe(seconds)
        histogram.observe(seconds)
    shown = [
        [line for line in generate_latest(one).decode().splitlines() if "_created " not in line]
        for one in (ours, theirs)
    ]
    assert shown[0] == shown[1]


def test_tokens_that_arrive_together_share_their_time() -> None:
    registry = CollectorRegistry()
    times = Times("waits_seconds", "How long it takes", (0.5, 1.0))
    registry.register(times)
    times.observe(0.25, 4)
    text = generate_latest(registry).decode()
    assert 'waits_seconds_bucket{le="0.5"} 4.0' in text and "waits_seconds_sum 1.0" in text
