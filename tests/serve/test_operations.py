"""What operators set: origins of web pages, TLS, and settings that change while it serves."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import ssl
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trustme

import kvboost
from kvboost.serve import process
from kvboost.serve.app import create_app
from kvboost.serve.process import Server
from kvboost.serve.settings import ServerSettings, parse_keys
from support.live_server import live_app

PAGE = "https://app.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}
BODY = {"model": "fake", "prompt": "words"}


def test_formats_are_prepared_before_requests_are_taken(fake, monkeypatch) -> None:
    """Their tokenizer takes a second in which nothing else of the process runs."""
    order: list[str] = []
    monkeypatch.setattr(fake, "prepare_formats", lambda: order.append("prepared"))
    monkeypatch.setattr(process, "run", lambda *given: order.append("run"))
    before = sys.getswitchinterval()
    try:
        with process.bind("127.0.0.1", 0) as listening:
            process.serve(fake, ServerSettings(), listening)
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
    assert order == ["prepared", "run"]


def test_browsers_may_not_call_it_by_default(client) -> None:
    answer = client.options("/v1/completions", headers=PREFLIGHT)
    assert answer.status_code == 405
    answer = client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_pages_of_allowed_origins_may_call_it_with_a_key(serve_fake) -> None:
    client = serve_fake(cors_origins=(PAGE,), keys=parse_keys(["ann:k-ann"], "test"))
    preflight = client.options("/v1/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200  # without a key: browsers send none here
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    for headers, status in (({"authorization": "Bearer k-ann"}, 200), ({}, 401)):
        answer = client.post("/v1/completions", json=BODY, headers={"origin": PAGE, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-kvboost-ttft-ms" in answer.headers["access-control-expose-headers"]
    other = client.options("/v1/completions", headers={**PREFLIGHT, "origin": "https://evil.test"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "ftp://a", ""])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(kvboost.ConfigError, match=r"https://app\.example"):
        ServerSettings(cors_origins=(origin,))


def issue(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    return cert, key


def serial(url: str, trusted: ssl.SSLContext) -> int:
    """The serial number of the server's certificate, after a request was answered."""
    with httpx.Client(verify=trusted) as client:
        answer = client.post(f"{url}/v1/completions", json=BODY)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "Hello"
        stream = answer.extensions["network_stream"]
        shown = stream.get_extra_info("ssl_object").getpeercert()
    return int(shown["serialNumber"], 16)


def test_a_server_takes_a_new_certificate_for_https(fake, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    authority = trustme.CA()
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    cert, key = issue(authority, tmp_path)
    app = create_app(fake, ServerSettings(tls_cert=cert, tls_key=key, drain_seconds=5.0))
    with live_app(app) as live:
        url = live.url.replace("http:", "https:")
        live.server._on_reload = list
        first = serial(url, trusted)
        assert serial(url, trusted) == first
        issue(authority, tmp_path)
        live.server.reload()
        second = serial(url, trusted)
        key.write_text("no key")
        live.server.reload()
        assert serial(url, trusted) == second != first
    assert "TLS certificate (read again)" in caplog.text
    assert "nothing was changed: the TLS certificate" in caplog.text


def test_mistakes_of_tls_and_traces_are_found_at_once(tmp_path, monkeypatch) -> None:
    cert, key = issue(trustme.CA(), tmp_path)
    with pytest.raises(kvboost.ConfigError, match="needs its certificate"):
        ServerSettings(tls_key=key)
    with pytest.raises(kvboost.ConfigError, match=r"cert\.pem cannot be used"):
        ServerSettings(tls_cert=cert)
    with pytest.raises(kvboost.ConfigError, match=r"gone\.pem is not a regular file"):
        ServerSettings(tls_cert=tmp_path / "gone.pem")
    with pytest.raises(kvboost.ConfigError, match="such as http"):
        ServerSettings(otlp_endpoint="collector:4318")
    monkeypatch.setattr("kvboost.serve.settings.find_spec", lambda name: None)
    with pytest.raises(kvboost.ConfigError, match=r"pip install .kvboost\[otel\]"):
        ServerSettings(otlp_endpoint="http://collector:4318")


def test_a_running_server_takes_over_new_keys_and_names(serve_fake) -> None:
    client = serve_fake(keys=parse_keys(["ann:k-ann"], "test"), served_names=("fake",))
    state = client.app.state.server

    def status(key: str, model: str = "fake") -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {**BODY, "model": model}
        return client.post("/v1/completions", json=body, headers=headers).status_code

    assert status("k-ann") == 200 and status("k-bob") == 401
    new = replace(
        state.settings,
        keys=parse_keys(["bob:k-bob"], "test"),
        served_names=("other",),
        max_requests=1,
    )
    assert state.reload(new) == ["served_names", "keys"]
    assert status("k-ann") == 401 and status("k-bob", "other") == 200 and status("k-bob") == 404
    assert state.settings.max_requests == ServerSettings.max_requests
    with pytest.raises(kvboost.ConfigError, match="restart"):
        state.reload(replace(state.settings, keys=()))
    assert status("k-bob", "other") == 200


def no_certificates(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SSL_CERT_FILE", "/gone.pem")
    return "SSL_CERT_FILE='/gone.pem'"


def no_thread(monkeypatch: pytest.MonkeyPatch) -> str:
    said = "can't start new thread"
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvboost-images":
            raise RuntimeError(said)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return said


@pytest.mark.parametrize("broken", [no_certificates, no_thread])
def test_settings_whose_images_cannot_be_fetched_change_nothing(
    serve_fake, monkeypatch, caplog, broken
) -> None:
    keys = parse_keys(["ann:k-ann", "bob:k-bob"], "test")
    client = serve_fake(keys=keys, served_names=("fake",))
    state = client.app.state.server
    before, tenants = state.settings, state.keys.tenants()
    new = replace(before, keys=keys[:1], served_names=("b",), image_hosts=("a.example",))
    with monkeypatch.context() as patch:
        said = broken(patch)
        server = Server(client.app, lambda: None, lambda: state.reload(new))
        server.reload()
    assert "reload: nothing was changed: images cannot be fetched" in caplog.text
    assert said in caplog.text
    assert (state.settings, state.keys.tenants(), state.names) == (before, tenants, ("fake",))
    assert state.image_hosts is None and state.images is None
    server.reload()
    assert state.names == ("b",) and [one.name for one in state.keys.tenants()] == ["ann"]
    assert state.images is not None


def test_what_a_removed_key_has_left_is_dropped(serve_fake, fake) -> None:
    """Also if the same key is added again later."""
    keys = parse_keys(["ann:k-ann", "bob:k-bob"], "test")
    client = serve_fake(keys=keys)
    state = client.app.state.server
    left = {}
    for name in ("ann", "bob"):
        headers = {"authorization": f"Bearer k-{name}"}
        asked = {"model": "fake", "input": "hi", "kvboost": {"session": "s"}}
        response = client.post("/v1/responses", json=asked, headers=headers).json()
        made = client.post("/kvboost/documents", json={"text": "x"}, headers=headers).json()
        paths = (f"/v1/responses/{response['id']}", f"/kvboost/documents/{made['id']}")
        left[name] = headers, (*paths, "/kvboost/sessions/s")
    assert len(fake.pins()) == 4  # of a response and a session each
    state.reload(replace(state.settings, keys=keys[:1]))
    assert len(fake.pins()) == 2
    state.reload(replace(state.settings, keys=keys))
    for name, status in (("ann", 200), ("bob", 404)):
        headers, paths = left[name]
        assert [client.get(path, headers=headers).status_code for path in paths] == [status] * 3


def test_sighup_reads_the_settings_again(fake) -> None:
    before = signal.getsignal(signal.SIGHUP)

    async def reloaded() -> None:
        seen = asyncio.Event()

        def reread() -> list[str]:
            seen.set()
            return []

        with Server(create_app(fake), lambda: None, reread).capture_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await seen.wait()

    asyncio.run(reloaded())
    assert signal.getsignal(signal.SIGHUP) is before
