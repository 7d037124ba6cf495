"""Images over the APIs: answered like any prompt, and hostile ones with an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
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
from support.live_server import live_server
from support.remote_server import remote_server
from support.vision_models import about, file_of, picture, vision_engine

IMAGE = picture(1, 50, 30)
EXPECTED = about(IMAGE, QUESTION)
NO_END = {"256": -100}


URL = data_url(file_of(IMAGE))


SERVERS: dict[str, Any] = {"one process": live_server, "two processes": remote_server}


@pytest.fixture(scope="module", params=SERVERS)
def served(request: Any) -> Iterator[tuple[KVBoost, httpx.Client]]:
    with ExitStack() as stack:
        made = vision_engine("smolvlm", max_images=3, max_image_bytes=20_000)
        engine = stack.enter_context(made)
        server = stack.enter_context(SERVERS[request.param](engine, served_names=("m",)))
        yield engine, stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        assert engine.check_integrity() == []


@pytest.fixture
def engine(served: tuple[KVBoost, httpx.Client]) -> KVBoost:
    return served[0]


@pytest.fixture
def client(served: tuple[KVBoost, httpx.Client]) -> httpx.Client:
    return served[1]


@pytest.mark.parametrize("api", APIS)
def test_an_image_is_answered_as_in_the_library(client, engine, api) -> None:
    path, body = APIS[api](URL, temperature=0)
    expected = engine.chat(EXPECTED, 6, "baseline", temperature=0).output_text
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert text_of(answer) == expected
    vision = engine._model.vision
    seen = vision.num_images
    path, body = APIS[api](URL, "And is it red?", temperature=0)
    second = client.post(path, json=body)
    assert second.status_code == 200 and vision.num_images == seen
    assert int(second.headers["x-kvboost-exact-tokens"]) > 60


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("wrong", FILES)
def test_a_hostile_file_is_refused_and_the_server_lives(client, api, wrong) -> None:
    file, said = FILES[wrong]
    path, body = APIS[api](data_url(file))
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and said in error_of(answer), answer.text
    path, body = APIS[api](URL)
    assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/cat.png", "must be a data URL"),
        ("http://169.254.169.254/latest/meta-data", "this server fetches no addresses"),
        ("file:///etc/passwd", "must be a data URL"),
        ("/etc/passwd", "must be a data URL"),
        ("data:image/png,abc", "must be a data URL"),
        ("data:image/png;base64,!!!!", "the data of an image is not base64"),
        (data_url(b"\0" * 30_000), "an image has 30,000 bytes; at most 20,000 are allowed"),
    ],
)
def test_what_is_no_data_url_of_an_image_is_refused(client, url, said) -> None:
    for path, body in (chat(url), responses(url)):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and said in error_of(answer), answer.text


def test_anthropics_sources_are_checked(client) -> None:
    path, body = anthropic(URL)
    block = body["messages"][0]["content"][0]
    for source, said in (
        ({"type": "url", "url": "https://example.com/cat.png"}, "fetches no addresses"),
        ({"type": "file", "file_id": "f"}, "a source of the type base64 or url"),
        ({"type": "base64", "media_type": "image/tiff", "data": "aa"}, "media_type"),
    ):
        block["source"] = source
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and said in error_of(answer), answer.text
    block["source"] = {"type": "url", "url": URL}
    assert client.post(path, json=body).status_code == 200


def test_too_many_images_are_refused(client) -> None:
    path, body = chat(URL)
    message = body["messages"][0]
    message["content"] *= 4
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and "more than 3 images; at most 3" in error_of(answer)
    assert answer.json()["error"]["code"] == "invalid_image"


def test_images_are_the_users(client) -> None:
    for path, body in (chat(URL), responses(URL)):
        said = body["messages" if "messages" in body else "input"]
        said[0]["role"] = "system"
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "goes with the role user" in error_of(answer)


def test_images_stream_and_are_counted(client, engine) -> None:
    path, body = chat(URL, stream=True, temperature=0, logit_bias=NO_END)
    answer = client.post(path, json=body)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    path, body = anthropic(URL)
    del body["max_tokens"]
    count = client.post(f"{path}/count_tokens", json=body).json()["input_tokens"]
    assert count == len(engine.encode(EXPECTED))


def test_a_kept_response_goes_on_from_its_image(client, engine) -> None:
    path, body = responses(URL, store=True)
    first = client.post(path, json=body).json()
    seen = engine._model.vision.num_images
    more = {"model": "m", "input": "And now?", "previous_response_id": first["id"]}
    second = client.post(path, json={**more, "max_output_tokens": 4})
    assert second.status_code == 200 and engine._model.vision.num_images == seen
    items = client.get(f"{path}/{second.json()['id']}/input_items").json()["data"]
    images = [part for item in items for part in item["content"] if part["type"] == "input_image"]
    assert [image["image_url"] for image in images] == [URL]


def test_rows_of_images_as_token_ids_are_refused(client, engine) -> None:
    ids = engine.encode(EXPECTED)
    answer = client.post("/v1/completions", json={"model": "m", "prompt": ids, "max_tokens": 2})
    assert answer.status_code == 400 and "that was not given" in error_of(answer)


def test_explanations_and_plans_know_images(client) -> None:
    path, body = chat(URL, kvboost={"explain": True})
    answer = client.post(path, json=body)
    assert answer.status_code == 200 and answer.json()["kvboost"]["spans"]
    plan = client.post("/kvboost/plan", json=chat(URL)[1])
    assert plan.status_code == 200 and plan.json()["exact_tokens"] > 60, plan.text
