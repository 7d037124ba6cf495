"""Images over the APIs, sent as data or named by address: answered like any prompt, or refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from kvboost import KVBoost
from kvboost.serve.app import create_app
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import parse
from kvboost.serve.images.addresses import ImageHosts
from kvboost.serve.images.fetcher import ImageFetcher
from kvboost.serve.schema.fields import BodyContext
from kvboost.serve.schema.requests import ChatRequest
from kvboost.serve.settings import ServerSettings
from support.hostile_images import FILES
from support.image_requests import (
    APIS,
    QUESTION,
    anthropic,
    chat,
    data_url,
    error_of,
    responses,
    text_of,
)
from support.live_server import LiveServer, live_server
from support.remote_server import remote_server
from support.scripted_upstream import Scripted, hang, say, upstream
from support.vision_models import about, file_of, picture, vision_engine

IMAGE = picture(1, 50, 30)
FILE = file_of(IMAGE)
DATA = data_url(FILE)
EXPECTED = about(IMAGE, QUESTION)
SERVERS: dict[str, Any] = {"one process": live_server, "two processes": remote_server}


def shows(file: bytes) -> Any:
    return say(200, file, content_type="image/png")


@pytest.fixture(scope="module")
def site() -> Iterator[Scripted]:
    """A server with images."""
    with upstream() as running:
        yield running


@pytest.fixture
def url(site: Scripted) -> str:
    """The address of an image there."""
    site.act = shows(FILE)
    site.asked.clear()
    site.gone.clear()
    return f"{site.url}/a.png?size=large"


@pytest.fixture(params=["data", "address"])
def image(request: Any, site: Scripted, url: str) -> Callable[[bytes], str]:
    """What a request says for a file: its data, or where it is."""

    def place(file: bytes) -> str:
        site.act = shows(file)
        return url if request.param == "address" else data_url(file)

    return place


@pytest.fixture(scope="module", params=SERVERS)
def served(request: Any, site: Scripted) -> Iterator[tuple[KVBoost, LiveServer]]:
    host = site.url.removeprefix("http://")
    with ExitStack() as stack:
        made = vision_engine("smolvlm", max_images=3, max_image_bytes=20_000)
        engine = stack.enter_context(made)
        settings = {"served_names": ("m",), "image_hosts": (host,), "max_body_bytes": 100_000}
        yield engine, stack.enter_context(SERVERS[request.param](engine, **settings))
        assert engine.check_integrity() == []


@pytest.fixture
def engine(served: tuple[KVBoost, LiveServer]) -> KVBoost:
    return served[0]


@pytest.fixture
def server(served: tuple[KVBoost, LiveServer]) -> LiveServer:
    return served[1]


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


@pytest.mark.parametrize("api", APIS)
def test_an_image_is_answered_as_in_the_library_and_known_afterwards(
    client, engine, site, image, api
) -> None:
    path, body = APIS[api](image(FILE), temperature=0)
    expected = engine.chat(EXPECTED, 6, "baseline", temperature=0).output_text
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert text_of(answer) == expected
    assert {target for target, _, _ in site.asked} <= {"/a.png?size=large"}
    seen = engine.model.vision.num_images
    path, body = APIS[api](DATA, "And is it red?", temperature=0)
    second = client.post(path, json=body)
    assert second.status_code == 200 and engine.model.vision.num_images == seen
    assert int(second.headers["x-kvboost-exact-tokens"]) > 60


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("wrong", FILES)
def test_a_hostile_file_is_refused_and_the_server_lives(client, image, api, wrong) -> None:
    file, said = FILES[wrong]
    path, body = APIS[api](image(file))
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and said in error_of(answer), answer.text
    path, body = APIS[api](image(FILE))
    assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("data:image/png,abc", "must be a data URL"),
        ("data:image/png;base64,!!!!", "the data of an image is not base64"),
        (data_url(b"\0" * 30_000), "an image has 30,000 bytes; at most 20,000 are allowed"),
    ],
)
def test_what_is_no_data_url_of_an_image_is_refused(client, wrong, said) -> None:
    for path, body in (chat(wrong), responses(wrong)):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and said in error_of(answer), answer.text


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "wrong", ["http://169.254.169.254/a", "https://example.com/a", "http://127.0.0.1/", "file:///a"]
)
def test_other_addresses_are_refused_where_they_are(client, site, url, api, wrong) -> None:
    path, body = APIS[api](wrong)
    answer = client.post(path, json=body)
    said = error_of(answer)
    assert answer.status_code == 400 and f"not '{wrong}': an address must" in said
    assert "image_url: must be a data URL" in said or "url: must be a data URL" in said
    assert site.url.removeprefix("http://") not in said and site.asked == []


@pytest.mark.parametrize("api", APIS)
def test_an_image_that_is_not_there_is_the_requests_mistake(client, site, url, api) -> None:
    site.act = say(404)
    path, body = APIS[api](url)
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and "answered with the status 404" in error_of(answer)
    assert url in error_of(answer)
    if api != "anthropic":
        assert answer.json()["error"]["code"] == "image_not_fetched"


def test_anthropics_sources_are_checked(client) -> None:
    path, body = anthropic(DATA)
    block = body["messages"][0]["content"][0]
    for source, said in (
        ({"type": "file", "file_id": "f"}, "a source of the type base64 or url"),
        ({"type": "base64", "media_type": "image/tiff", "data": "aa"}, "media_type"),
    ):
        block["source"] = source
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and said in error_of(answer), answer.text
    block["source"] = {"type": "url", "url": DATA}
    assert client.post(path, json=body).status_code == 200


def test_nothing_is_fetched_for_a_model_that_is_not_there(client, site, url) -> None:
    asked = [make(url) for make in APIS.values()]
    _, body = anthropic(url)
    del body["max_tokens"]
    asked += [("/v1/messages/count_tokens", body)]
    asked += [(path, chat(url)[1]) for path in ("/kvboost/plan", "/tokenize")]
    for path, body in asked:
        answer = client.post(path, json={**body, "model": "other"})
        assert answer.status_code == 404 and "'other'" in error_of(answer), answer.text
    assert site.asked == []


def test_nothing_is_fetched_for_a_request_that_is_wrong(client, site, url) -> None:
    path, body = chat(url, temperature=-1)
    assert client.post(path, json=body).status_code == 400
    path, body = chat(url)
    content = body["messages"][0]["content"]
    sent = {"type": "image_url", "image_url": {"url": DATA}}
    body["messages"][0]["content"] = [*content[:1] * 2, sent, sent]
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and "more than 3 images; at most 3" in error_of(answer)
    assert answer.json()["error"]["code"] == "invalid_image"
    for path, body in (chat(url), responses(url)):
        body["messages" if "messages" in body else "input"][0]["role"] = "system"
        assert "goes with the role user" in error_of(client.post(path, json=body))
    assert site.asked == []


def test_the_same_address_is_fetched_once_and_its_bytes_count_as_often_as_it_occurs(
    client, site, url, server
) -> None:
    path, body = chat(url)
    body["messages"][0]["content"] *= 3
    assert client.post(path, json=body).status_code == 200
    assert len(site.asked) == 1
    site.act = shows(b"x" * 10_001)
    state = server.server.state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "settings", replace(state.settings, max_body_bytes=30_000))
        answer = client.post(path, json=body)
    assert answer.status_code == 400 and "more than 30,000 bytes" in error_of(answer)


def test_the_addresses_of_a_body_are_bounded_and_each_is_checked_once(monkeypatch) -> None:
    """Other clients may wait while they are checked."""
    checked = []
    check = ImageHosts.check
    monkeypatch.setattr(ImageHosts, "check", lambda *given: checked.append(1) or check(*given))

    def addresses(*urls: str) -> list[int]:
        _, body = chat("")
        image, question = body["messages"][0]["content"]
        images = [{**image, "image_url": {"url": url}} for url in urls]
        body["messages"][0]["content"] = [*images, question]
        context = BodyContext(max_images=99, image_hosts=ImageHosts(["a.example"]))
        parse(TypeAdapter(ChatRequest), json.dumps(body).encode(), context)
        return list(context.to_fetch.values())

    url = "https://a.example/"
    url += "a" * (8191 - len(url))
    assert addresses(*(f"{url}{n}" for n in range(4)), *[f"{url}0"] * 9) == [10, 1, 1, 1]
    assert len(checked) == 4
    for more in (url, "https://a.example/"):
        with pytest.raises(ApiError, match=r"32,768 bytes .*send data URLs") as caught:
            addresses(*(f"{url}{n}" for n in range(4)), more)
        assert (caught.value.status, caught.value.code) == (400, "invalid_value")
        assert caught.value.param == "messages[0].content[4].image_url.url"
    with pytest.raises(ApiError, match="32,768"):
        addresses(*(f"https://a.example/{n}" + "é" * 1300 for n in range(13)))  # two bytes each


def test_a_client_that_leaves_ends_the_download(server, site, url) -> None:
    site.act = hang(site)
    path, body = chat(url)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{path}", json=body, timeout=httpx.Timeout(60, read=0.5))
    assert not site.asked or site.gone.wait(60)


def test_streams_counts_plans_and_explanations_know_images(client, engine, image) -> None:
    given = image(FILE)
    path, body = chat(given, stream=True, temperature=0)
    answer = client.post(path, json=body)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    path, body = anthropic(given)
    del body["max_tokens"]
    count = client.post(f"{path}/count_tokens", json=body).json()["input_tokens"]
    assert count == len(engine.encode(EXPECTED))
    plan = client.post("/kvboost/plan", json=chat(given)[1])
    assert plan.status_code == 200 and plan.json()["exact_tokens"] > 60, plan.text
    path, body = chat(given, kvboost={"explain": True})
    assert client.post(path, json=body).json()["kvboost"]["spans"]


def test_a_kept_response_goes_on_from_the_image_itself(client, engine, image) -> None:
    path, body = responses(image(FILE), store=True)
    first = client.post(path, json=body).json()
    seen = engine.model.vision.num_images
    more = {"model": "m", "input": "And now?", "previous_response_id": first["id"]}
    second = client.post(path, json={**more, "max_output_tokens": 4})
    assert second.status_code == 200 and engine.model.vision.num_images == seen
    items = client.get(f"{path}/{second.json()['id']}/input_items").json()["data"]
    images = [part for item in items for part in item["content"] if part["type"] == "input_image"]
    assert [one["image_url"] for one in images] == [DATA]


def test_rows_of_images_as_token_ids_are_refused(client, engine) -> None:
    ids = engine.encode(EXPECTED)
    answer = client.post("/v1/completions", json={"model": "m", "prompt": ids, "max_tokens": 2})
    assert answer.status_code == 400 and "that was not given" in error_of(answer)


def test_a_running_server_takes_over_other_hosts(server, client, site, url) -> None:
    state = server.server.state
    hosts = state.settings.image_hosts
    assert state.reload(replace(state.settings, image_hosts=())) == ["image_hosts"]
    for path, body in (chat(url), anthropic(url), chat("/etc/passwd")):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "must be a data URL" in answer.text
        assert "its operator allows hosts (--image-host)" in answer.text
    assert state.reload(replace(state.settings, image_hosts=hosts)) == ["image_hosts"]
    path, body = chat(url)
    assert client.post(path, json=body).status_code == 200 and len(site.asked) == 1


def test_a_server_that_stops_refuses_to_fetch(server, client, site, url, monkeypatch) -> None:
    monkeypatch.setattr(server.server.state, "images", None)
    path, body = chat(url)
    assert client.post(path, json=body).status_code == 503 and not site.asked


def test_nothing_is_fetched_once_the_server_stops(fake, monkeypatch) -> None:
    app = create_app(fake, ServerSettings(image_hosts=("images.example.com",)))
    state, at_the_end = app.state.server, []
    close = ImageFetcher.close

    def closing(fetcher: ImageFetcher) -> None:
        at_the_end.append((state.images, state.image_hosts))
        close(fetcher)

    monkeypatch.setattr(ImageFetcher, "close", closing)
    with TestClient(app):
        assert state.images is not None
    assert at_the_end == [(None, None)]


def test_a_server_that_stops_leaves_no_thread(fake) -> None:
    def fetches() -> bool:
        return any(thread.name == "kvboost-images" for thread in threading.enumerate())

    app = create_app(fake, ServerSettings(image_hosts=("images.example.com",)))
    others = fetches()
    for _ in range(2):
        with TestClient(app):
            assert fetches()
            assert app.state.server.images is not None
        assert fetches() == others and app.state.server.images is None
