"""Clients that try to get past the router: nothing is smuggled, and no upstream is lost by it."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from kvboost.deploy.proxy import create_router
from kvboost.deploy.state import ProxySettings
from support.live_server import connect, live_router, read_until, wait_for
from support.routed import CLIENT, answers, ask, get, metric, raw_request
from support.scripted_upstream import lists, stream, upstream

BODY = b'{"prompt": "x"}'
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKS = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def routed_one():
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        yield one, router


@pytest.mark.parametrize(
    "headers",
    [
        (b"transfer-encoding: chunked", b"content-length: 6"),
        (b"transfer-encoding: xchunked", b"content-length: 6"),
        (b"transfer-encoding : chunked", b"content-length: 6"),
        (b"transfer-encoding: chunked, identity", b"content-length: 6"),
        (b"transfer-encoding: identity", b"transfer-encoding: chunked"),
        (b"transfer-encoding:", b" chunked", b"content-length: 6"),
        (b"content-length: 6", b"content-length: 0"),
        (b"content-length: +6",),
        (b"content-length: 0x6",),
        (b"x: a\rtransfer-encoding: chunked", b"content-length: 6"),
        (b"x: a\0b", b"content-length: 6"),
    ],
)
def test_no_head_hides_a_second_request(routed_one, headers: tuple[bytes, ...]) -> None:
    one, router = routed_one
    one.asked.clear()
    head = b"\r\n".join([b"POST /v1/first HTTP/1.1", b"host: x", *headers])
    statuses = answers(router, head + b"\r\n\r\n0\r\n\r\nG" + SMUGGLED)
    assert statuses[0] == 400 or [path for path, *_ in one.asked][:1] == ["/v1/first"]
    assert "/v1/smuggled" not in [path for path, *_ in one.asked]


def test_a_body_has_one_length_when_it_is_sent_on(routed_one) -> None:
    one, router = routed_one
    one.asked.clear()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert answers(router, head + CHUNKS)[0] == 200
    _, headers, body = one.asked[0]
    assert body == BODY and headers["content-length"] == str(len(BODY))
    assert "transfer-encoding" not in headers


@pytest.mark.parametrize("named", ["content-length", "host", "content-type", "x-request-id"])
def test_a_connection_header_cannot_remove_what_the_router_needs(routed_one, named: str) -> None:
    one, router = routed_one
    one.asked.clear()
    assert answers(router, raw_request("/v1/x", BODY, f"connection: {named}"))[0] == 200
    _, headers, body = one.asked[0]
    assert body == BODY and headers["host"] == one.url.removeprefix("http://")


def test_what_names_an_upstream_is_the_routers_alone(routed_one) -> None:
    one, router = routed_one
    one.asked.clear()
    answer = ask(router.url, headers={"x-kvboost-upstream": "http://evil", "x-request-id": "a b"})
    assert answer.headers["x-kvboost-upstream"] == one.url
    ((_, headers, _),) = one.asked
    assert "x-kvboost-upstream" not in headers and headers["x-request-id"] == "a b"


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags", "/v1/files"])
@pytest.mark.parametrize("value", ["a ", "a\t", " \ta \t "])
def test_blanks_around_a_value_are_not_sent_on_and_harm_no_upstream(path: str, value: str) -> None:
    with upstream(models=lists("m")) as one, live_router(one.url, health_seconds=60) as router:
        one.asked_models.clear()
        assert answers(router, raw_request(path, b"", f"x-a:{value}", method="GET"))[0] == 200
        asked = one.asked_models + [(path, headers) for path, headers, _ in one.asked]
        assert asked[0][0] == path and asked[0][1]["x-a"] == value.strip()
        assert get(router.url, "/ready").json()["upstreams"] == {one.url: "up"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files"])
def test_a_header_that_cannot_be_sent_is_the_clients_mistake(path: str) -> None:
    """uvicorn's parser lets none through; others may."""
    with upstream(models=lists("m")) as one:
        app = create_router(ProxySettings((one.url,), health_seconds=60))
        with TestClient(app, "http://localhost") as client:
            answer = client.get(path, headers={"x-a": "a\x0bb"})
            assert answer.status_code == 400 and "not valid HTTP" in answer.text
            assert client.get("/ready").json()["upstreams"] == {one.url: "up"}


def test_a_prompt_that_makes_no_sense_is_for_the_upstream_to_refuse(routed_one) -> None:
    one, router = routed_one
    one.asked.clear()
    assert ask(router.url, [[[0, 1]] * 50]).status_code == 200 and len(one.asked) == 1


def test_many_headers_are_refused_and_the_upstream_stays(routed_one) -> None:
    """Sent on, they are more than an upstream takes: it may close the connection."""
    one, router = routed_one
    one.asked.clear()
    answer = CLIENT.post(f"{router.url}/v1/x", headers=[("a", "")] * 300)
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == "headers_too_large" and not one.asked
    assert answers(router, raw_request("/v1/x", b"", *["a:"] * 8000))[0] == 431
    assert get(router.url, "/ready").json()["upstreams"] == {one.url: "up"}


def test_a_hundred_streams_that_are_broken_off_leave_nothing_open() -> None:
    def leave(number: int) -> None:
        with connect(router, b'{"prompt": "%d", "stream": true}' % number) as connection:
            if number % 3:
                read_until(connection, b"data: 1")
            if number % 2:  # with a reset
                linger = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    events = [b"data: 1\n\n" * 1000] * 50
    with upstream(stream(*events)) as one, live_router(one.url, health_seconds=60) as router:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(leave, range(100)))
        wait_for(lambda: metric(router.url, "open_requests", upstream=one.url) == 0)
        assert ask(router.url, stream=True).text.count("data: 1") == 50_000
        assert get(router.url, "/ready").json()["upstreams"] == {one.url: "up"}
