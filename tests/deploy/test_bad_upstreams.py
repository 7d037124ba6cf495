"""Upstreams whose answers contradict themselves: one clear error, or an answer that is visibly
broken, and never another request's answer."""

from __future__ import annotations

import json
import logging
from contextlib import suppress

import httpx
import pytest

from support.live_server import live_router, wait_for
from support.routed import CLIENT, ask, get, metric
from support.scripted_upstream import hang, hang_up, lists, say, stream, upstream, wire

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"content-length: 2\r\n"
LONG = b"x" * 300_000
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\n"
LINES = OK + b"content-type: application/x-ndjson\r\n"

BAD = {  # answers of which nothing can be passed on, and what the client is told about them
    "length and chunks": (
        LENGTH + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "both a Content-Length and a Transfer-Encoding",
    ),
    "two lengths": (LENGTH + b"content-length: 3\r\n\r\n{}", "conflicting Content-Length"),
    "a list of lengths": (OK + b"content-length: 2, 3\r\n\r\n{}", "conflicting Content-Length"),
    "a negative length": (OK + b"content-length: -2\r\n\r\n{}", "bad Content-Length"),
    "no number": (OK + b"content-length: two\r\n\r\n{}", "bad Content-Length"),
    "a sign": (OK + b"content-length: +2\r\n\r\n{}", "bad Content-Length"),
    "a huge length": (OK + b"content-length: " + b"9" * 40 + b"\r\n\r\n{}", "bad Content-Length"),
    "a name with a blank": (LENGTH + b"bad name: 1\r\n\r\n{}", "illegal header line"),
    "a name with NUL": (LENGTH + b"bad\0name: 1\r\n\r\n{}", "illegal header line"),
    "no colon": (LENGTH + b"bad\r\n\r\n{}", "illegal header line"),
    "a value with NUL": (LENGTH + b"x: a\0b\r\n\r\n{}", "illegal header line"),
    "a value with CR": (LENGTH + b"x: a\rb\r\n\r\n{}", "illegal header line"),
    "a control character": (LENGTH + b"x: \x1b[31m\r\n\r\n{}", "control character"),
    "a longer body": (LENGTH + b"\r\n{}junk", "longer than its Content-Length"),
    "a chunk of size zz": (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", "illegal chunk header"),
    "a negative chunk": (CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", "illegal chunk header"),
    "a longer chunk": (CHUNKED + b"2\r\n{}!!0\r\n\r\n", "malformed chunk footer"),
    "an endless chunk line": (CHUNKED + b"2;" + b"x" * 70_000, "more than 65,536 bytes"),
    "an endless trailer": (CHUNKED + b"0\r\n" + b"x: y\r\n" * 15_000, "more than 65,536 bytes"),
    "an unknown encoding": (OK + b"transfer-encoding: gzip, chunked\r\n\r\n", "chunked is supp"),
    "two encodings": (OK + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n", "multiple Transfer"),
    "TLS": (b"\x16\x03\x01 garbage\r\n\r\n", "illegal"),
    "words": (b"hello there friend\r\n\r\n", "illegal status line"),
    "a status in words": (b"HTTP/1.1 fine OK\r\n\r\n", "illegal status line"),
    "status 000": (b"HTTP/1.1 000 OK\r\ncontent-length: 2\r\n\r\n{}", "status_code"),
    "status 999": (b"HTTP/1.1 999 OK\r\ncontent-length: 2\r\n\r\n{}", "status 999"),
    "HTTP/2": (b"\0\0\x12\x04\0\0\0\0\0", "illegal"),
    "a switch": (b"HTTP/1.1 101 Now\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "101"),
    "many 1xx": (b"HTTP/1.1 103 Early\r\n\r\n" * 20, "more than 16 interim"),
    "endless headers": (OK + b"x: y\r\n" * 15_000, "more than 65,536 bytes"),
    "an endless header": (OK + b"x: " + b"y" * 70_000, "more than 65,536 bytes"),
    "an endless status": (b"HTTP/1.1 200 " + b"y" * 70_000, "more than 65,536 bytes"),
    "a bad refusal": (
        b"HTTP/1.1 503 No\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "both a Content-Length and a Transfer-Encoding",
    ),
}


@pytest.fixture
def no_traceback(caplog):
    """Fails a test in which something logs a traceback."""
    with caplog.at_level(logging.INFO):
        yield
    assert not [record for record in caplog.records if record.exc_info]


@pytest.fixture(scope="module")
def routed_one():
    """An upstream, and a router that checks it again only when it fails."""
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        yield one, router.url


@pytest.mark.usefixtures("no_traceback")
@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_is_not_http_is_one_clear_error(routed_one, name: str) -> None:
    sent, told = BAD[name]
    one, url = routed_one
    one.asked.clear()
    one.act, failures = wire(sent, then=hang_up), metric(url, "retries_total")
    answer = ask(url)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (502, "bad_upstream")
    assert told in error["message"] and one.url in error["message"]
    assert len(one.asked) == 1
    assert metric(url, "retries_total", cause="RemoteProtocolError") == failures + 1
    one.act = say(200, b"fine")
    wait_for(lambda: get(url, "/ready").status_code == 200)
    assert ask(url).text == "fine"


@pytest.mark.usefixtures("no_traceback")
def test_another_upstream_answers_instead() -> None:
    sent, _ = BAD["length and chunks"]
    with (
        upstream(wire(sent)) as bad,
        upstream(say(200, b"fine")) as good,
        live_router(bad.url, good.url, health_seconds=60) as router,
    ):
        assert ask(router.url).text == "fine" and len(bad.asked) == len(good.asked) == 1


@pytest.mark.usefixtures("no_traceback")
@pytest.mark.parametrize(
    "sent",
    [
        OK + b"content-length: 999999\r\n\r\n" + b"x" * 600_000,
        CHUNKED + b"9\r\n{}",
        CHUNKED + b"2\r\n{}\r\n",
        EVENTS + b"content-length: 999999\r\n\r\n" + b"data: 1\n\n" * 60_000,
        EVENTS + b"transfer-encoding: chunked\r\n\r\n8\r\ndata: 1\n\r\n",
        LINES + b'transfer-encoding: chunked\r\n\r\nb\r\n{"a": 1}\n{"\r\n',
        b"HTTP/1.1 503 No\r\ncontent-length: 300001\r\n\r\n" + LONG,
    ],
)
def test_half_an_answer_is_visibly_broken(sent: bytes) -> None:
    with (
        upstream(wire(sent, then=hang_up)) as one,
        live_router(one.url, health_seconds=60) as router,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            ask(router.url)
        assert metric(router.url, "lost_total", upstream=one.url) == 1


@pytest.mark.parametrize(
    "sent",
    [
        *(b"", b"HTTP/1.1 200 O", CHUNKED, OK + b"content-length: 9\r\n\r\n{}"),
        b"HTTP/1.1 503 No\r\ncontent-length: 9\r\n\r\n{}",
    ],
)
def test_an_upstream_that_is_lost_before_it_says_anything_is_named(sent: bytes) -> None:
    with (
        upstream(wire(sent, then=hang_up)) as one,
        live_router(one.url, health_seconds=60) as router,
    ):
        answer = ask(router.url)
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_lost"
        assert one.url in answer.json()["error"]["message"]


@pytest.mark.usefixtures("no_traceback")
@pytest.mark.parametrize("status", [204, 304])
def test_a_body_where_none_can_be_is_dropped(status: int) -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = wire(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\n{}" % status)
        answer = ask(router.url)
        assert (answer.status_code, answer.content) == (status, b"")
        assert "content-length" not in answer.headers
        one.act = say(200, b"fine")
        assert ask(router.url).text == "fine"


def test_no_user_gets_what_followed_the_answer_of_another() -> None:
    secret = OK + b"content-length: 6\r\n\r\nsecret"
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = wire(CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + secret)
        assert ask(router.url, headers={"authorization": "Bearer ann"}).text == "{}"
        one.act = say(200, b"fine")
        for _ in range(3):
            assert ask(router.url, headers={"authorization": "Bearer bob"}).text == "fine"


def test_some_1xx_and_an_early_answer_are_fine() -> None:
    early = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}"
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = wire(b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + LENGTH + b"\r\n{}")
        assert ask(router.url).text == "{}"
        one.reads, one.act = False, wire(early, then=hang_up)
        assert ask(router.url, "x" * 6_000_000).status_code == 413
        assert get(router.url, "/ready").status_code == 200


def test_a_head_that_never_ends_is_a_timeout() -> None:
    """Every byte of it resets a limit on silence."""

    def dribble(handler) -> None:
        with suppress(OSError):
            while not one.gone.wait(0.05):
                handler.wfile.write(b"x")

    with upstream() as one, live_router(one.url, timeout=0.3) as router:
        one.act = wire(OK + b"x: ", then=dribble)
        answer = ask(router.url)
        one.gone.set()
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


@pytest.mark.usefixtures("no_traceback")
def test_an_endless_list_of_models_is_not_read() -> None:
    def endless(handler) -> None:
        with suppress(OSError):
            handler.wfile.write(CHUNKED)
            while True:
                handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    with upstream(models=endless) as one, live_router(one.url, health_seconds=60) as router:
        assert ask(router.url).status_code == 200
        answer = get(router.url, "/v1/models")
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "bad_upstream"
        assert f"{one.url} has more than 1,048,576 bytes" in answer.json()["error"]["message"]
        assert get(router.url, "/ready").json()["upstreams"] == {one.url: "up"}


def test_a_list_that_is_too_long_is_left_out_of_the_joined_list() -> None:
    with (
        upstream(models=say(200, b" " * 1024**2 + b"{}")) as long,
        upstream(models=lists("m")) as other,
        live_router(long.url, other.url, health_seconds=60) as router,
    ):
        listed = get(router.url, "/v1/models")
        assert [one["id"] for one in listed.json()["data"]] == ["m"]
        assert listed.headers["x-kvboost-upstream"] == other.url
        states = get(router.url, "/ready").json()["upstreams"]
        assert states == {long.url: "up", other.url: "up"}


def test_only_the_status_of_a_health_check_counts() -> None:
    with upstream(check=LONG) as one, live_router(one.url, health_seconds=60) as router:
        assert get(router.url, "/ready").json()["upstreams"] == {one.url: "up"}
        assert ask(router.url).status_code == 200


@pytest.mark.usefixtures("no_traceback")
@pytest.mark.parametrize(
    "body",
    [
        b"content-length: 300000\r\n\r\n" + LONG,
        b"transfer-encoding: chunked\r\n\r\n493e0\r\n" + LONG + b"\r\n0\r\n\r\n",
    ],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("status", [404, 429, 502, 503])
def test_a_long_refusal_is_the_answer_and_its_upstream_stays(status: int, body: bytes) -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = wire(b"HTTP/1.1 %d No\r\nretry-after: 7\r\n" % status + body)
        answer = ask(router.url)
        assert (answer.status_code, answer.content) == (status, LONG)
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-kvboost-upstream"] == one.url
        assert get(router.url, "/ready").json()["upstreams"] == {one.url: "up"}
        assert metric(router.url, "known_tokens", upstream=one.url) == 0
        assert metric(router.url, "retries_total") == 0
        one.act = say(200, b"fine")
        assert ask(router.url).text == "fine"


def test_a_head_waits_for_its_body_so_that_another_upstream_can_answer() -> None:
    with (
        upstream(stream(then=hang_up)) as bad,
        upstream(stream(b"data: 1\n\n")) as good,
        live_router(bad.url, good.url, health_seconds=60) as router,
    ):
        assert ask(router.url, stream=True).text == "data: 1\n\n"
        assert len(bad.asked) == len(good.asked) == 1


def test_a_client_that_leaves_while_a_body_is_awaited_is_noticed() -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        one.act = wire(CHUNKED, then=hang(one))
        with pytest.raises(httpx.ReadTimeout):
            CLIENT.post(f"{router.url}/v1/completions", content=b"{}", timeout=0.2)
        assert one.gone.wait(120)
        assert json.loads(get(router.url, "/health").text) == {"status": "ok"}
