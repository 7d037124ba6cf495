"""Models, health, the page, and the headers of every response."""

from __future__ import annotations

import pytest

from kvboost.errors import RankLostError
from kvboost.serve.app import create_app
from kvboost.serve.server import ServerState
from support.fake_engine import FakeEngine


def test_the_model_is_served_under_all_its_names(serve_fake) -> None:
    client = serve_fake(served_names=("org/model", "alias"))
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == [
        "org/model",
        "alias",
    ]
    for one in listed["data"]:
        assert one["context_length"] == one["max_model_len"] == 100
    assert client.get("/v1/models/org/model").json()["id"] == "org/model"
    assert client.get("/v1/models/fake").json()["error"]["code"] == "model_not_found"
    for name in ("org/model", "alias"):
        said = client.post("/v1/completions", json={"model": name, "prompt": "a"}).json()
        assert said["model"] == name


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("org/model", "org/model"),
        ("/home/me/models/tiny", "tiny"),
        ("./tiny.gguf", "tiny"),
    ],
)
def test_the_path_of_a_model_is_not_shown(name, served) -> None:
    fake = FakeEngine()
    fake.model_name = name
    assert create_app(fake).state.server.names == (served,)


def test_the_server_is_ready_until_it_stops(client, fake) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    server: ServerState = client.app.state.server
    server.draining = True
    assert client.get("/ready").status_code == 503 and client.get("/health").is_success


def test_a_server_whose_engine_has_failed_is_to_be_started_again(client, fake) -> None:
    fake.failure = RankLostError("rank 1 has ended")
    for path in ("/ready", "/health"):
        answer = client.get(path)
        assert answer.status_code == 503 and answer.json() == {"status": "failed"}


def test_the_page_has_a_content_security_policy_and_no_other_files(client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "KVBoost" in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    script = client.get("/static/app.js")
    assert script.is_success and "javascript" in script.headers["content-type"]
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404
    assert client.get("/static/nothing.js").json()["error"]["message"].startswith("there is no")


def test_browsers_do_not_store_api_responses(client) -> None:
    for path in ("/v1/models", "/kvboost/live", "/metrics", "/nothing"):
        assert client.get(path).headers["cache-control"] == "no-store"
    assert client.get("/static/app.js").headers["cache-control"] == "no-cache"


def test_every_response_has_a_request_id(client) -> None:
    first, second = (client.get("/health").headers["x-request-id"] for _ in "12")
    assert first.startswith("req-") and first != second
    named = client.get("/nothing", headers={"x-request-id": "mine-1.2_3"})
    assert named.headers["x-request-id"] == "mine-1.2_3"
    for wrong in ("a b", "x" * 200, "ä".encode()):
        told = client.get("/health", headers={"x-request-id": wrong})
        assert told.headers["x-request-id"].startswith("req-")
