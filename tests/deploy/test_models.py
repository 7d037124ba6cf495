"""Servers with different models behind one router."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest

from kvboost.deploy.content import sketch
from kvboost.deploy.models import joined, listed, shown_names
from kvboost.serve.settings import ApiKey
from support.fake_engine import FakeEngine
from support.live_server import live_router, live_server, wait_for
from support.routed import CLIENT, ask, get, warmed
from support.scripted_upstream import hang, lists, say, upstream


@pytest.fixture
def two():
    """Upstreams for the models ``a`` and ``b``, which both serve ``both``, and their router."""
    with (
        upstream(models=lists("a", "both", by="one")) as one,
        upstream(models=lists("b", "both", by="other")) as other,
        live_router(one.url, other.url, health_seconds=60) as router,
    ):
        yield one, other, router.url


def test_a_request_goes_to_an_upstream_that_serves_its_model(two) -> None:
    one, other, url = two
    for _ in range(3):
        assert ask(url, model="a").headers["x-kvboost-upstream"] == one.url
        assert ask(url, model="b").headers["x-kvboost-upstream"] == other.url
    tagged = ask(url, model="b:latest", path="/api/generate")  # as Ollama's clients name it
    assert tagged.headers["x-kvboost-upstream"] == other.url
    went = {ask(url, model="both").headers["x-kvboost-upstream"] for _ in range(4)}
    assert went == {one.url, other.url}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_model_that_none_serves_is_404_with_the_names_there_are(two, path: str) -> None:
    one, other, url = two
    answer = ask(url, model="c", path=path)
    error = answer.json()["error"]
    assert answer.status_code == 404 and not one.asked and not other.asked
    assert "'c'" in error["message"] and "a, both, b" in error["message"]
    if path == "/v1/completions":
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_without_a_model_any_upstream_answers(two) -> None:
    _, _, url = two
    assert ask(url, model=None).status_code == 200
    assert CLIENT.post(f"{url}/v1/files", content=b"raw").status_code == 200


def test_lists_are_joined_and_asked_for_with_the_clients_key(two) -> None:
    one, other, url = two
    for each in (one, other):
        each.asked_models.clear()
    answer = get(url, "/v1/models?x=1", authorization="Bearer ann")
    assert answer.json() == {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "owned_by": by}
            for name, by in (("a", "one"), ("both", "one"), ("b", "other"))
        ],
    }
    assert answer.headers["x-kvboost-upstream"] == f"{one.url}, {other.url}"
    for each in (one, other):
        ((path, headers),) = each.asked_models
        assert path == "/v1/models?x=1" and headers["authorization"] == "Bearer ann"
        assert "accept-encoding" not in headers


def test_one_model_is_described_by_an_upstream_that_has_it(two) -> None:
    one, other, url = two
    one.models = other.models = lists("org/model")
    get(url, "/v1/models/b")
    assert [path for path, *_ in other.asked] == ["/v1/models/b"] and not one.asked
    answer = get(url, "/v1/models/c")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    for path in ("/v1/models/org/model", "/v1/models/org%2Fmodel"):
        assert get(url, path).status_code == 200
        assert path in [asked for asked, *_ in one.asked + other.asked]


def test_a_model_that_was_just_loaded_is_found_at_once(two) -> None:
    _, other, url = two
    other.models = lists("b", "adapter")
    assert ask(url, model="adapter").headers["x-kvboost-upstream"] == other.url


def test_many_unknown_names_ask_upstreams_once(two, monkeypatch) -> None:
    one, _, url = two
    one.asked_models.clear()
    monkeypatch.setattr("kvboost.deploy.upstreams.UNKNOWN_SECONDS", 1e9)
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(lambda number: ask(url, model=f"c{number}"), range(20))
        assert {answer.status_code for answer in answers} == {404}
    assert len(one.asked_models) == 1


def test_an_upstream_that_says_404_is_followed_by_the_next() -> None:
    """Their lists need a key, so the router cannot know."""
    unknown = say(404, b'{"error": {"code": "model_not_found"}}')
    with (
        upstream(unknown, models=say(401)) as one,
        upstream(models=say(401)) as other,
        live_router(one.url, other.url, health_seconds=60) as router,
    ):
        for _ in range(3):
            assert ask(router.url).headers["x-kvboost-upstream"] == other.url
        other.act = unknown
        assert ask(router.url).json() == {"error": {"code": "model_not_found"}}
        refused = get(router.url, "/v1/models")
        assert refused.status_code == 401 and refused.headers["x-kvboost-upstream"] == one.url


def test_an_upstream_that_lists_late_is_listed_as_before(two, monkeypatch) -> None:
    one, other, url = two
    monkeypatch.setattr("kvboost.deploy.forward.CHECK_SECONDS", 0.2)
    one.models = hang(one)
    names = [entry["id"] for entry in get(url, "/v1/models").json()["data"]]
    assert names == ["a", "both", "b"]
    assert get(url, "/ready").json()["upstreams"] == {one.url: "up", other.url: "up"}


def test_a_model_whose_upstream_is_down_is_503(two) -> None:
    one, other, url = two
    other.ready = 503
    other.act = say(503)
    ask(url, model="b")
    wait_for(lambda: get(url, "/ready").json()["upstreams"][other.url] == "draining")
    assert ask(url, model="b").status_code == 503
    assert ask(url, model="both").headers["x-kvboost-upstream"] == one.url


def test_real_servers_with_two_models_and_keys_serve_openais_client() -> None:
    with ExitStack() as stack:
        keys = (ApiKey("ann", "k-ann"),)
        servers = [
            warmed(stack.enter_context(live_server(FakeEngine(), served_names=(name,), keys=keys)))
            for name in ("small", "org/large")
        ]
        router = stack.enter_context(live_router(*(server.url for server in servers)))
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="k-ann", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["small", "org/large"]
            for name, server in zip(("small", "org/large"), servers, strict=True):
                assert client.models.retrieve(name).id == name
                asked = client.completions.with_raw_response.create(model=name, prompt="Hello")
                assert asked.headers["x-kvboost-upstream"] == server.url
                assert asked.parse().choices[0].text == "Hello"
            with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
                client.completions.create(model="other", prompt="Hello")
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()
        listed = get(router.url, "/api/tags", authorization="Bearer k-ann").json()["models"]
        assert [one["name"] for one in listed] == ["small:latest", "org/large:latest"]
        refused = get(router.url, "/api/tags", authorization="Bearer wrong")
        assert refused.status_code == 401 and "not valid" in refused.json()["error"]


def test_lists_of_any_kind_are_read_or_not() -> None:
    entry = {"id": "m", "x": "\ud800"}
    assert listed(json.dumps({"data": [entry, {"id": "m", "x": 2}]}).encode()) == {
        "m": json.dumps(entry)
    }
    for wrong in (
        *(b"", b"[]", b"{", b"null", b'"x"', b'{"data": null}', b'{"data": ["m"]}'),
        *(b'{"data": [{"name": "m"}]}', b'{"data": [{"id": "m", "x": NaN}]}', b"[" * 100_000),
        *(b'{"data": [{"id": "m", "x": 1e999}]}', b"\xff", b'{"data": {"a": 1}}'),
    ):
        assert listed(wrong) is None
    first, second = {"a": "1", "b": "2"}, {"c": "3", "a": "4"}
    assert joined([first, second]) == b'{"object":"list","data":[1,2,3]}'
    assert joined([first, second], "/api/tags") == b'{"models":[1,2,3]}'
    tags = b'{"models": [{"name": "m", "size": 1}]}'
    assert listed(tags, "/api/tags") == {"m": '{"name": "m", "size": 1}'}
    assert listed(tags) is None
    assert shown_names([]) == "none"
    assert shown_names(["\x1b[31m", "x" * 100]).startswith(r"'\x1b[31m', 'xxx")
    assert shown_names(map(str, range(20))).endswith("10, 11 and 8 more")


def test_a_sketch_names_the_model() -> None:
    assert sketch(b'{"model": "m", "prompt": "Hello there"}').model == "m"
    assert sketch(b'{"model": "m"}').model == sketch(b'{"model": "m", "prompt": [1]}').model == "m"
    assert sketch(b'{"model": ["m"], "prompt": "x"}').model == sketch(b"[]").model == ""
