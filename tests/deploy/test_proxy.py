"""The router on the network: what passes through it, and what it does when an upstream fails."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from kvboost.deploy.state import ProxySettings
from kvboost.errors import ConfigError
from support.fake_engine import FakeEngine
from support.live_server import connect, events, live_router, live_server, read_until, wait_for
from support.passages import text
from support.routed import CLIENT, COMPLETIONS, ask, get, metric, warmed
from support.scripted_upstream import hang, hang_up, say, stream, upstream


@pytest.fixture
def pair():
    """Two upstreams that answer, and a router for them."""
    with upstream() as one, upstream() as other, live_router(one.url, other.url) as router:
        yield one, other, router.url


def test_answers_come_through_unchanged_and_name_their_upstream() -> None:
    body, engine = b'{"text": "\xc3\xa9"}', {"x_from": "upstream", "content_type": "application/x"}
    with upstream(say(418, body, **engine)) as one, live_router(one.url) as router:
        answer = ask(router.url, headers={"authorization": "Bearer k", "x-mine": "1"})
        ((path, headers, sent),) = one.asked
    assert (answer.status_code, answer.content) == (418, body)
    assert answer.headers["x-from"] == "upstream"
    assert answer.headers["content-type"] == "application/x"
    assert answer.headers["x-kvboost-upstream"] == one.url
    assert path == COMPLETIONS and json.loads(sent) == {"model": "fake", "prompt": "Hello"}
    assert headers["authorization"] == "Bearer k" and headers["x-mine"] == "1"
    assert headers["host"] == one.url.removeprefix("http://")
    assert headers["x-request-id"].startswith("req-")


def test_queries_other_methods_and_other_bodies_pass_too(pair) -> None:
    one, other, url = pair
    assert get(url, '/v1/batches?limit=2&x=%20"').status_code == 200
    assert CLIENT.post(f"{url}/v1/files", content=b"\x00raw").status_code == 200
    asked = sorted(one.asked + other.asked)
    assert [(path, body) for path, _, body in asked] == [
        ("/v1/batches?limit=2&x=%20%22", b""),
        ("/v1/files", b"\x00raw"),
    ]
    assert "content-type" not in asked[1][1] and "user-agent" in asked[1][1]


def test_headers_of_one_connection_stay_there(pair) -> None:
    one, other, url = pair
    ask(url, headers={"connection": "x-hop, keep-alive", "x-hop": "1", "te": "trailers"})
    ((_, headers, _),) = one.asked + other.asked
    assert "x-hop" not in headers and "te" not in headers


def test_a_real_server_behind_it_streams_and_keeps_its_tenants(tmp_path) -> None:
    with ExitStack() as stack:
        engines = [FakeEngine(), FakeEngine()]
        servers = [warmed(stack.enter_context(live_server(engine))) for engine in engines]
        router = stack.enter_context(live_router(*(server.url for server in servers)))
        whole = ask(router.url)
        assert whole.json()["choices"][0]["text"] == "Hello"
        streamed = ask(router.url, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert "".join(one["choices"][0]["text"] for one in events(streamed.text)) == "Hello"
        wrong = ask(router.url, temperature="red")
        assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]
        assert metric(router.url, "reported_tokens_total", kind="new") > 0


def test_ollamas_api_passes_and_goes_where_its_text_was_read() -> None:
    with ExitStack() as stack:
        engines = [FakeEngine(), FakeEngine()]
        for engine in engines:
            engine.context_length = None
        servers = [warmed(stack.enter_context(live_server(engine))) for engine in engines]
        router = stack.enter_context(live_router(*(server.url for server in servers)))
        for seed in range(4):
            system = {"role": "system", "content": text(seed)}
            went = set()
            for question in ("Why?", "When?"):
                messages = [system, {"role": "user", "content": question}]
                asked = {"model": "fake:latest", "messages": messages}
                answer = CLIENT.post(f"{router.url}/api/chat", json=asked)
                went.add(answer.headers["x-kvboost-upstream"])
                lines = [json.loads(line) for line in answer.text.splitlines()]
                assert "".join(one["message"]["content"] for one in lines) == "Hello"
            assert len(went) == 1
        assert metric(router.url, "decisions_total", reason="new") == 4
        assert [len(engine.asked) for engine in engines] == [4, 4]
        missed = CLIENT.post(f"{router.url}/api/show", json={"model": "other"})
        assert missed.status_code == 404 and "there is fake" in missed.json()["error"]
        listed = get(router.url, "/api/tags").json()["models"]
        assert [one["name"] for one in listed] == ["fake:latest"]


def test_a_document_goes_back_to_where_it_was_read_and_metrics_say_why(pair) -> None:
    one, other, url = pair
    first = {seed: ask(url, text(seed)).headers["x-kvboost-upstream"] for seed in range(6)}
    assert sorted(first.values()).count(one.url) == 3
    for seed in (3, 1, 5, 0, 2, 4):
        again = ask(url, f"{text(f'new {seed}', 20)} {text(seed)} Why?")
        assert again.headers["x-kvboost-upstream"] == first[seed]
    assert metric(url, "decisions_total", reason="new") == 6
    assert metric(url, "decisions_total", reason="content") == 6
    assert metric(url, "expected_tokens_total", kind="elsewhere") > 1000
    assert metric(url, "requests_total", upstream=other.url, status="200") == 6
    assert metric(url, "open_requests", upstream=one.url) == 0
    assert metric(url, "known_tokens", upstream=one.url) > 0


@pytest.mark.parametrize(("shared", "reason"), [(False, "new"), (True, "beginning")])
def test_keys_are_tenants_unless_the_cache_is_shared(shared: bool, reason: str) -> None:
    with (
        upstream() as one,
        upstream() as other,
        live_router(one.url, other.url, shared_cache=shared) as router,
    ):
        ask(router.url, text(1), headers={"authorization": "Bearer ann"})
        ask(router.url, text(1), headers={"authorization": "Bearer bob"})
        expected = 2 if reason == "new" else 1
        assert metric(router.url, "decisions_total", reason=reason) == expected


def test_events_arrive_one_by_one() -> None:
    """The first event comes although the upstream sends nothing more."""
    with upstream() as one, live_router(one.url) as router:
        one.act = stream(b"data: 1\n\n", then=hang(one))
        connection = connect(router, json.dumps({"prompt": "x", "stream": True}).encode())
        read_until(connection, b"data: 1")
        connection.close()
        assert one.gone.wait(120)  # and the upstream sees the client leave


def test_a_client_that_leaves_before_the_answer_ends_the_request() -> None:
    with upstream() as one, live_router(one.url) as router:
        one.act = hang(one)
        connection = connect(router, b'{"prompt": "x"}')
        wait_for(lambda: bool(one.asked))
        connection.close()
        assert one.gone.wait(120)
        wait_for(lambda: metric(router.url, "open_requests", upstream=one.url) == 0)


@pytest.mark.parametrize("failure", [hang_up, say(503), say(429), say(502)])
def test_a_request_that_got_no_answer_goes_to_another_upstream(failure) -> None:
    with (
        upstream(failure) as bad,
        upstream() as good,
        live_router(bad.url, good.url, health_seconds=60) as router,
    ):
        answer = ask(router.url, text(1))
        assert answer.status_code == 200
        assert answer.headers["x-kvboost-upstream"] == good.url
        assert len(bad.asked) == len(good.asked) == 1
        assert metric(router.url, "retries_total", upstream=bad.url) == 1
        assert metric(router.url, "open_requests", upstream=bad.url) == 0
        assert metric(router.url, "known_tokens", upstream=bad.url) == 0
        assert metric(router.url, "known_tokens", upstream=good.url) > 0


def test_a_request_that_may_have_had_an_effect_is_not_sent_twice() -> None:
    with upstream(hang_up) as bad, upstream() as good, live_router(bad.url, good.url) as router:
        answer = ask(router.url, path="/v1/files")
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_lost" and not good.asked


@pytest.mark.parametrize(("status", "times"), [(502, 1), (503, 2), (429, 2)])
def test_a_502_is_the_answer_to_a_request_that_may_have_had_an_effect(status, times) -> None:
    """A gateway's server may have done it. 429 and 503 say that nothing was done."""
    refusing = say(status, b"no")
    with (
        upstream(refusing) as one,
        upstream(refusing) as other,
        live_router(one.url, other.url, health_seconds=60) as router,
    ):
        answer = ask(router.url, path="/v1/files")
        assert (answer.status_code, answer.text) == (status, "no")
        assert len(one.asked) + len(other.asked) == times


def test_a_request_that_ends_its_upstreams_does_not_reach_all_of_them() -> None:
    with (
        upstream(hang_up) as one,
        upstream(hang_up) as other,
        upstream() as third,
        live_router(one.url, other.url, third.url, health_seconds=60) as router,
    ):
        answer = ask(router.url)
        assert answer.status_code == 502 and len(one.asked) == len(other.asked) == 1
        assert "send the request again" in answer.json()["error"]["message"] and not third.asked


def test_if_all_refuse_the_client_sees_why() -> None:
    full = say(429, b'{"error": {"code": "queue_full"}}', retry_after="7")
    with upstream(full) as one, upstream(full) as other, live_router(one.url, other.url) as router:
        answer = ask(router.url)
        assert len(one.asked) == len(other.asked) == 1
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "queue_full"


def test_without_any_upstream_the_answer_is_503_with_retry_after() -> None:
    with upstream() as one:
        gone = one.url
    with live_router(gone) as router:
        answer = ask(router.url)
        assert answer.status_code == 503 and answer.headers["retry-after"].isdigit()
        assert answer.json()["error"]["code"] == "no_upstream"
        assert "1 down" in answer.json()["error"]["message"]
        assert get(router.url, "/health").json() == {"status": "ok"}
        ready = get(router.url, "/ready")
        assert ready.status_code == 503 and ready.json()["upstreams"] == {gone: "down"}
        assert metric(router.url, "requests_total", upstream="", status="503") == 1


def test_a_draining_upstream_is_taken_out_and_back_in(pair) -> None:
    one, other, url = pair
    one.ready = 503
    wait_for(lambda: get(url, "/ready").json()["upstreams"][one.url] == "draining")
    for _ in range(3):
        assert ask(url).headers["x-kvboost-upstream"] == other.url
    assert get(url, "/ready").status_code == 200
    assert metric(url, "upstream_up", upstream=one.url) == 0
    one.ready = 200
    wait_for(lambda: get(url, "/ready").json()["upstreams"][one.url] == "up")
    assert {ask(url).headers["x-kvboost-upstream"] for _ in range(4)} == {one.url, other.url}


def test_a_server_without_ready_is_asked_for_its_health() -> None:
    with upstream(ready=404) as vllm, live_router(vllm.url) as router:
        assert ask(router.url).status_code == 200
        vllm.health = 500
        wait_for(lambda: get(router.url, "/ready").json()["upstreams"][vllm.url] == "down")


def test_a_stream_whose_upstream_is_lost_ends_with_an_error_event() -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = stream(b'data: {"a": 1}\n\n', then=hang_up)
        answer = ask(router.url, stream=True)
        first, last = answer.text.removesuffix("\n\n").split("\n\n")
        assert first == 'data: {"a": 1}'
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "upstream_lost" and "send the request again" in error["message"]
        assert metric(router.url, "lost_total", upstream=one.url) == 1


def test_a_stream_of_lines_whose_upstream_is_lost_ends_with_a_line_that_says_so() -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = stream(b'{"a": 1}\n', then=hang_up, kind="application/x-ndjson")
        answer = ask(router.url, path="/api/generate", stream=True)
        first, last = map(json.loads, answer.text.splitlines())
        assert first == {"a": 1} and "send the request again" in last["error"]


def test_an_upstream_that_says_nothing_is_a_timeout() -> None:
    with upstream() as one, live_router(one.url, timeout=0.2) as router:
        one.act = hang(one)
        answer = ask(router.url)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


def test_large_bodies_many_values_and_other_paths_are_refused_or_survived(pair) -> None:
    one, _, url = pair
    with live_router(one.url, limits={"max_body_bytes": 2048}) as small:
        answer = ask(small.url, "x" * 4000)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert ask(url, [0] * 300_000).status_code == 200  # the upstream decides
    assert metric(url, "expected_tokens_total", kind="new") == 0
    for path in ("/kvboost/cache", "/docs"):
        answer = get(url, path)
        assert answer.status_code == 404 and "this is a router" in answer.text
    with live_router(one.url, limits={"metrics": "off"}) as closed:
        assert get(closed.url, "/metrics").status_code == 404


def test_clients_see_that_there_is_a_router_and_people_what_it_does(pair) -> None:
    one, other, url = pair
    seen, read = CLIENT.head(f"{url}/"), get(url, "/")
    assert (seen.status_code, seen.content) == (200, b"")
    assert read.status_code == 200 and read.text.startswith("this is a router: it forwards /v1/")
    assert not one.asked and not other.asked


def test_addresses_are_checked() -> None:
    assert ProxySettings(("http://a:1/v1/", "https://b/x")).upstreams == (
        "http://a:1",
        "https://b/x",
    )
    for wrong in (
        "a:8000",
        "ftp://a",
        "http://",
        "http://u:p@a",
        "http://a?q",
        "http://a:x",
        "//a",
    ):
        with pytest.raises(ConfigError, match="is not the address of a server"):
            ProxySettings((wrong,))
    with pytest.raises(ConfigError, match="no upstream is given"):
        ProxySettings(())
    with pytest.raises(ConfigError, match="health_seconds"):
        ProxySettings(("http://a",), health_seconds=0)
