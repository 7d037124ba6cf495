"""Limits of requests, tested on both sides."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from kvboost.serve.settings import parse_keys
from support.fake_engine import FakeEngine
from support.live_server import connect, live_server, read_until, wait_for


def filled(size: int) -> bytes:
    """A request of ``size`` bytes."""
    body = b'{"model":"fake","prompt":"%s"}'
    return body % (b"x" * (size - len(body) + 2))


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_at_the_limit_is_accepted_and_one_byte_more_is_not(
    serve_fake, fake, in_chunks: bool
) -> None:
    fake.context_length = None
    client = serve_fake(max_body_bytes=2000)

    def send(size: int):
        body = filled(size)
        content = iter([body[:900], body[900:]]) if in_chunks else body
        headers = {"content-type": "application/json"}
        return client.post("/v1/completions", content=content, headers=headers)

    assert send(2000).is_success
    refused = send(2001)
    error = refused.json()["error"]
    assert refused.status_code == 413 and error["code"] == "body_too_large"
    assert in_chunks or "2,001 bytes; at most 2,000 bytes" in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_a_body_must_be_declared_as_json(client, kind) -> None:
    refused = client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
    assert refused.status_code == 415 and refused.json()["error"]["code"] == "not_json"
    declared = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", content=filled(100), headers=declared).is_success


def test_large_headers_are_refused(serve_fake) -> None:
    client = serve_fake(max_header_bytes=2000)
    assert client.get("/health", headers={"x-long": "a" * 1000}).is_success
    refused = client.get("/health", headers={"x-long": "a" * 2000})
    assert refused.status_code == 431 and "at most 2,000" in refused.json()["error"]["message"]
    assert client.get("/health", params={"q": "a" * 2000}).status_code == 431


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_server_answers_only_to_its_host_names(serve_fake, host, status) -> None:
    client = serve_fake(allowed_hosts=("localhost", "127.0.0.1", "::1"))
    assert client.get("/health", headers={"host": host}).status_code == status


def test_more_open_requests_than_allowed_are_refused() -> None:
    fake = FakeEngine(pieces=(None,))
    with live_server(fake, max_requests=2, drain_seconds=0.0) as server:
        hanging = [connect(server, filled(100)) for _ in range(2)]
        wait_for(lambda: len(fake.streams) == 2)
        with connect(server, filled(100)) as third:
            assert b" 503 " in read_until(third, b"2 requests are open")
        hanging.pop().close()
        wait_for(lambda: sum(stream.is_open for stream in fake.streams) == 1)
        with connect(server, b"", method="GET", path="/health") as after:
            assert b" 200 " in after.recv(10_000)
        hanging.pop().close()


@pytest.mark.parametrize(("keys", "most"), [(["ann:k-ann", "bob:k-bob"], 2), (["ann:k-ann"], 4)])
def test_one_key_among_several_has_half_of_the_open_requests(keys: list[str], most: int) -> None:
    fake = FakeEngine(pieces=(None,))
    settings = {"keys": parse_keys(keys, "test"), "max_requests": 4, "drain_seconds": 0.0}
    with live_server(fake, **settings) as server, ExitStack() as connections:

        def ask(key: str) -> socket.socket:
            return connections.enter_context(connect(server, filled(100), key=key))

        for number in range(1, most + 1):
            ask("k-ann")
            wait_for(lambda number=number: len(fake.streams) == number)
        refused = read_until(ask("k-ann"), b"as many as")
        if len(keys) == 1:
            assert b" 503 " in refused
            return
        assert b" 429 " in refused and b"requests of this key are open" in refused
        ask("k-bob")
        wait_for(lambda: len(fake.streams) == most + 1)


def test_a_body_must_arrive_in_time() -> None:
    with (
        live_server(FakeEngine(), body_seconds=0.2) as server,
        connect(server, b"half", length=100) as slow,
    ):
        assert b" 408 " in read_until(slow, b"within 0.2 s")


def test_a_body_that_is_far_too_large_is_refused_while_it_is_sent() -> None:
    with (
        live_server(FakeEngine(), max_body_bytes=2000) as server,
        connect(server, b"x" * 5_000_000) as large,
    ):
        assert b" 413 " in read_until(large, b"5,000,000 bytes")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://testserver"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://app.example", "sec-fetch-site": "cross-site"}, 200),
    ],
)
def test_other_peoples_web_pages_can_send_nothing(serve_fake, headers, status: int) -> None:
    """Browsers send plain text without asking first: any page could leave a document here."""
    client = serve_fake(cors_origins=("https://app.example",))
    sent = {"content-type": "text/plain", **headers}
    answer = client.post("/kvboost/files", content=b"A text.", headers=sent)
    assert answer.status_code == status, answer.text
    assert client.get("/health", headers=headers).status_code == 200


def test_many_small_headers_are_large(client) -> None:
    headers = [(f"h{number}", "") for number in range(5000)]
    assert client.get("/health", headers=headers).status_code == 431
