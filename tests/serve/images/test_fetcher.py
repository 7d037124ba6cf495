"""Downloads of images from servers that may do anything."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from kvboost.serve.errors import ApiError
from kvboost.serve.images import fetcher as fetching
from kvboost.serve.images.addresses import ImageHosts, IPAddress
from kvboost.serve.images.fetcher import FetchedImage, ImageFetcher
from kvboost.serve.metrics import Metrics
from support.fake_engine import FakeEngine
from support.hostile_images import PNG
from support.scripted_upstream import (
    Handler,
    Scripted,
    hang,
    hang_up,
    say,
    stream,
    upstream,
    wire,
)

IMAGE = say(200, PNG, content_type="image/png")
LOCAL = ip_address("127.0.0.1")
UNREACHED = "it cannot be reached, or is not one that this server may reach"


@pytest.fixture
def server() -> Iterator[Scripted]:
    with upstream(IMAGE) as running:
        yield running


def port_of(server: Scripted) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def fetch_all(
    urls: Sequence[str],
    hosts: Sequence[str],
    *,
    resolve: Callable[[str], Sequence[IPAddress]] = lambda name: [LOCAL],
    seconds: float = 60.0,
    most: int = 20_000,
    together: int = 100_000,
    metrics: Metrics | None = None,
) -> dict[str, FetchedImage]:
    async def run() -> dict[str, FetchedImage]:
        known = metrics or Metrics(FakeEngine())
        fetcher = ImageFetcher(known, seconds, resolve)
        counted = {url: urls.count(url) for url in urls}
        limits = {"most": most, "together": together}
        with closing(fetcher):
            return await fetcher.fetch(
                counted, ImageHosts(hosts), **limits, tenant="ann", request_id="req-1"
            )

    return asyncio.run(run())


def fetch(server: Scripted, path: str = "/a.png", **more: Any) -> bytes:
    url = f"{server.url}{path}"
    return fetch_all([url], [f"127.0.0.1:{port_of(server)}"], **more)[url].data


def refused(server: Scripted, path: str = "/a.png", **more: Any) -> str:
    with pytest.raises(ApiError) as caught:
        fetch(server, path, **more)
    assert (caught.value.status, caught.value.code) == (400, "image_not_fetched")
    return caught.value.message


def test_an_image_is_fetched_and_nothing_of_the_server_is_told(server, monkeypatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert fetch(server, "/a%20b.png?c=d#e") == PNG
    ((path, headers, _),) = server.asked
    assert path == "/a%20b.png?c=d"
    assert headers["accept-encoding"] == "identity"
    assert headers.keys() == {"host", "accept", "accept-encoding", "user-agent", "connection"}


def test_a_netrc_file_is_not_read(server, monkeypatch, tmp_path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ann password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert fetch(server) == PNG
    assert "authorization" not in server.asked[0][1]


def test_cookies_are_not_kept(server) -> None:
    server.act = say(200, PNG, content_type="image/png", set_cookie="a=b; Path=/")
    urls = [f"{server.url}/{number}.png" for number in range(3)]
    assert len(fetch_all(urls, [f"127.0.0.1:{port_of(server)}"])) == 3
    assert not any("cookie" in headers for _, headers, _ in server.asked)


def test_a_data_url_has_the_kind_that_the_server_says(server) -> None:
    server.act = say(200, b"abc", content_type="Image/JPEG; x=y")
    url = f"{server.url}/a"
    (image,) = fetch_all([url], [f"127.0.0.1:{port_of(server)}"]).values()
    assert image.data_url == "data:image/jpeg;base64,YWJj"


@pytest.mark.parametrize(
    "ip", ["127.0.0.1", "10.0.0.5", "169.254.169.254", "::1", "::ffff:127.0.0.1", "0.0.0.0"]
)
def test_a_name_for_a_private_address_is_refused(server, caplog, ip) -> None:
    caplog.set_level("INFO")
    port, asked = port_of(server), []

    def resolve(name: str) -> list[IPAddress]:
        asked.append(name)
        return [ip_address(ip)]

    with pytest.raises(ApiError) as caught:
        fetch_all([f"http://a.test:{port}/secret"], [f"*.test:{port}"], resolve=resolve)
    assert UNREACHED in caught.value.message and ip not in caught.value.message
    assert server.asked == [] and asked == ["a.test"]
    assert "req-1: an image of a.test" in caplog.text and "not public" in caplog.text
    assert "/secret" not in caplog.text


def test_the_client_cannot_tell_what_is_refused_from_what_is_not_there() -> None:
    def no_name(name: str) -> list[IPAddress]:
        raise OSError(-2, "Name or service not known")

    with upstream() as closed:
        port = port_of(closed)
    hosts, said = [f"a.test:{port}", f"127.0.0.1:{port}"], set()
    for resolve in (no_name, lambda name: [LOCAL], lambda name: [ip_address("10.9.9.9")]):
        with pytest.raises(ApiError) as caught:
            fetch_all([f"http://a.test:{port}/"], hosts, resolve=resolve)
        said.add(caught.value.message)
    assert len(said) == 1 and UNREACHED in said.pop()


def test_a_name_server_that_does_not_answer_holds_up_neither_a_request_nor_the_end() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def resolve(name: str) -> list[IPAddress]:
        asked.set()
        go_on.wait(60)
        return [LOCAL]

    with pytest.raises(ApiError, match="it did not arrive"):
        fetch_all(["http://a.test/"], ["a.test"], resolve=resolve, seconds=0.2)
    assert asked.is_set()
    (stuck,) = [one for one in threading.enumerate() if one.name == "kvboost-resolver"]
    assert stuck.daemon  # the interpreter waits for all others
    go_on.set()
    stuck.join(60)


def test_a_connection_goes_to_the_address_that_was_checked(server) -> None:
    """A name that means another machine the next time it is looked up does not matter."""
    answers = [[LOCAL], [ip_address("169.254.169.254")]]
    port = port_of(server)
    url = f"http://rebinding.test:{port}/a.png"
    hosts = [f"rebinding.test:{port}", f"127.0.0.1:{port}"]
    found = fetch_all([url], hosts, resolve=lambda name: answers.pop(0))
    assert found[url].data == PNG and len(answers) == 1
    assert server.asked[0][1]["host"] == f"rebinding.test:{port}"


def test_the_next_address_of_a_name_is_tried(server) -> None:
    port = port_of(server)
    url = f"http://a.test:{port}/a.png"
    hosts = [f"a.test:{port}", f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    addresses = [ip_address(one) for one in ("10.0.0.1", "127.0.0.2", "127.0.0.1")]
    assert fetch_all([url], hosts, resolve=lambda name: addresses)[url].data == PNG


def test_three_redirects_are_followed_and_no_more(server) -> None:
    def act(handler: Handler) -> None:
        left = int(handler.path.strip("/"))
        (say(302, location=f"/{left - 1}") if left else IMAGE)(handler)

    server.act = act
    assert fetch(server, "/3") == PNG
    assert "redirects more than 3 times" in refused(server, "/4")


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:169.254.169.254]/",
        "http://localhost/",
        "http://2852039166/",
        "http://127.0.0.1:1/",
        "https://127.0.0.1/",
        "file:///etc/passwd",
        "http://ann:secret@127.0.0.1/",
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_checked_like_the_first_address(server, status, location) -> None:
    server.act = say(status, PNG, content_type="image/png", location=location)
    said = refused(server)
    assert "redirects to another address, which must" in said and "169.254" not in said
    assert len(server.asked) == 1


def test_where_a_redirect_leads_is_looked_up_and_checked(server) -> None:
    port = port_of(server)
    server.act = say(302, location=f"http://b.test:{port}/")
    hosts = [f"a.test:{port}", f"b.test:{port}", f"127.0.0.1:{port}"]
    meant = {"a.test": [LOCAL], "b.test": [ip_address("169.254.169.254")]}
    with pytest.raises(ApiError, match="cannot be reached"):
        fetch_all([f"http://a.test:{port}/"], hosts, resolve=meant.__getitem__)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (say(404, PNG, content_type="image/png"), "answered with the status 404"),
        (say(206, PNG, content_type="image/png"), "answered with the status 206"),
        (say(304), "answered with the status 304"),
        (say(200, PNG), "its content-type is ''"),
        (say(200, PNG, content_type="text/html"), "its content-type is 'text/html'"),
        (say(200, PNG, content_type="image/svg+xml"), "must be one of image/png, image/jpeg"),
        (say(200, PNG, content_type="image/png", content_encoding="gzip"), "compressed as 'gzip'"),
        (say(200, b"x" * 20_001, content_type="image/png"), "it has more than 20,000 bytes"),
        (stream(*[b"x" * 5_000] * 5, kind="image/png"), "it has more than 20,000 bytes"),
        (stream(PNG[:100], kind="image/png", then=hang_up), "its connection broke"),
        (hang_up, UNREACHED),
        (wire(b"no HTTP at all\r\n\r\n", then=hang_up), UNREACHED),
        (wire(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000, then=hang_up), UNREACHED),
        (
            wire(
                b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 9\r\n\r\nab",
                then=hang_up,
            ),
            "its connection broke",
        ),
        (
            wire(
                b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 2\r\n"
                b"content-length: 9\r\n\r\nab",
                then=hang_up,
            ),
            UNREACHED,
        ),
    ],
)
def test_what_is_no_whole_image_of_an_allowed_size_is_refused(server, act, said) -> None:
    server.act = act
    assert said in refused(server)


def test_a_declared_size_is_refused_before_anything_is_read(server) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 99999999\r\n\r\n"
    server.act = wire(head, then=hang(server))
    assert "more than 20,000 bytes" in refused(server, seconds=0)
    assert server.gone.wait(60)


def test_images_share_the_bytes_of_their_request(server) -> None:
    server.act = say(200, b"x" * 10_000, content_type="image/png")
    hosts = [f"127.0.0.1:{port_of(server)}"]
    urls = [f"{server.url}/{number}" for number in range(3)]
    assert len(fetch_all(urls, hosts, together=30_000)) == 3
    for many in (urls, urls[:1] * 3):
        with pytest.raises(ApiError, match="more than 29,999 bytes, which they may have together"):
            fetch_all(many, hosts, together=29_999)
    server.asked.clear()
    fetch_all(urls[:1] * 3, hosts)
    assert len(server.asked) == 1


def test_a_slow_server_is_left(server) -> None:
    """Each of its bytes comes soon, but all of them never do."""
    left = threading.Event()

    def drip(handler: Handler) -> None:
        try:
            while not left.wait(0.01):
                handler.wfile.write(b"1\r\nx\r\n")
                handler.wfile.flush()
        except OSError:
            left.set()

    server.act = stream(kind="image/png", then=drip)
    assert "it did not arrive within 0.5 s" in refused(server, seconds=0.5)
    assert not server.asked or left.wait(60)


def test_a_head_that_never_ends_is_left(server) -> None:
    server.act = wire(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, then=hang(server))
    assert "it did not arrive within 0.5 s" in refused(server, seconds=0.5)
    assert not server.asked or server.gone.wait(60)


def test_if_one_image_fails_the_others_are_cancelled(server) -> None:
    hanging = threading.Event()

    def act(handler: Handler) -> None:
        if handler.path == "/hang":
            hanging.set()
            hang(server)(handler)
        else:
            hanging.wait(60)
            say(404)(handler)

    server.act = act
    urls = [f"{server.url}/hang", f"{server.url}/b"]
    with pytest.raises(ApiError, match="404"):
        fetch_all(urls, [f"127.0.0.1:{port_of(server)}"], seconds=0)
    assert server.gone.wait(60)


def test_a_tenant_has_half_of_the_places(server, monkeypatch) -> None:
    monkeypatch.setattr(fetching, "MAX_FETCHES", 4)
    open_now, most, lock, go = 0, 0, threading.Lock(), threading.Event()

    def act(handler: Handler) -> None:
        nonlocal open_now, most
        with lock:
            open_now += 1
            most = max(most, open_now)
        if open_now >= 2:
            go.set()
        go.wait(60)
        with lock:
            open_now -= 1
        IMAGE(handler)

    server.act = act
    urls = [f"{server.url}/{number}" for number in range(12)]
    assert len(fetch_all(urls, [f"127.0.0.1:{port_of(server)}"])) == 12
    assert most == 2


def test_fetched_and_failed_images_are_counted(server) -> None:
    metrics = Metrics(FakeEngine())
    fetch(server, metrics=metrics)
    server.act = say(404)
    refused(server, metrics=metrics)
    text = metrics.text().decode()
    assert 'kvboost_image_fetches_total{outcome="fetched"} 1.0' in text
    assert 'kvboost_image_fetches_total{outcome="failed"} 1.0' in text


@pytest.fixture
def tls(tmp_path: Path, monkeypatch) -> ssl.SSLContext:
    """What a server at a.test is trusted with."""
    authority = trustme.CA()
    trusted = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(trusted)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("a.test").configure_cert(context)
    return context


@pytest.fixture
def secure(tls: ssl.SSLContext) -> Iterator[Scripted]:
    with upstream(IMAGE, tls=tls) as running:
        yield running


def test_a_certificate_must_be_that_of_the_name(secure, caplog) -> None:
    """The connection is to an IP address, which is in no certificate."""
    caplog.set_level("INFO")
    port = port_of(secure)
    hosts = [f"*.test:{port}", f"127.0.0.1:{port}"]
    urls = [f"https://{name}.test:{port}/" for name in "ab"]
    assert fetch_all(urls[:1], hosts)[urls[0]].data == PNG
    with pytest.raises(ApiError, match="cannot be reached"):
        fetch_all(urls[1:], hosts)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    server_url = f"https://a.test:{port}/"
    secure.act = say(302, location=f"http://a.test:{port}/")
    with pytest.raises(ApiError, match="must begin with https://, as the address before it"):
        fetch_all([server_url], hosts)


def fails_over_tls(port: int) -> str:
    """What the client is told of an image at a.test, which has two IP addresses."""
    addresses = [LOCAL, ip_address("127.0.0.2")]
    hosts = [f"a.test:{port}", f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    with pytest.raises(ApiError) as caught:
        fetch_all([f"https://a.test:{port}/"], hosts, resolve=lambda name: addresses)
    assert (caught.value.status, caught.value.code) == (400, "image_not_fetched")
    return caught.value.message


def test_a_host_that_wants_a_certificate_of_ours_is_not_reached(tls, caplog) -> None:
    """In TLS 1.3 it says so after the handshake."""
    caplog.set_level("INFO")
    tls.verify_mode = ssl.CERT_REQUIRED

    def refuse(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        accepted.settimeout(60)
        secured = tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        with suppress(ssl.SSLError):
            secured.do_handshake()
        with socket.socket(fileno=secured.detach()) as raw:  # reset, it would lose what it said
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(60)
            while raw.recv(1000):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        served = threads.submit(refuse, listening)
        assert UNREACHED in fails_over_tls(listening.getsockname()[1])
        served.result()
    assert "SSLError" in caplog.text and "CERTIFICATE_REQUIRED" in caplog.text


def test_a_broken_record_is_a_broken_connection(secure) -> None:
    def act(handler: Handler) -> None:
        stream(PNG[:50], kind="image/png", then=lambda _: None)(handler)
        with socket.socket(fileno=handler.connection.detach()) as raw:
            raw.sendall(b"\x17\x03\x03\x00\x20" + b"x" * 32)

    secure.act = act
    assert "its connection broke" in fails_over_tls(port_of(secure))
    assert len(secure.asked) == 1


def test_a_redirect_to_what_is_no_address_is_refused(server) -> None:
    server.act = say(302, location="https:////{[-@@.")
    assert "redirects to another address, which must be a valid address" in refused(server)
