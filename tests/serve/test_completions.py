"""Completions, in OpenAI's format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.serve.settings import parse_keys
from support.live_server import events


def body(prompt: Any = "Say", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, **more}


def test_a_whole_answer(client, fake) -> None:
    said = client.post("/v1/completions", json=body()).json()
    assert said["object"] == "text_completion" and said["id"].startswith("cmpl-")
    (choice,) = said["choices"]
    assert choice == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert fake.asked[0]["max"] == 16


def test_a_stream_is_pieces_and_a_finish_reason(client) -> None:
    chunks = events(client.post("/v1/completions", json=body(stream=True)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["Hel", "lo", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("ab", [b"ab"]),
        (["a", "b"], [b"a", b"b"]),
        ([97, 98.0], [b"ab"]),
        ([[97], [98]], [b"a", b"b"]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_them(client, fake, prompt, read) -> None:
    said = client.post("/v1/completions", json=body(prompt, n=2)).json()
    assert [bytes(asked["prompt"]) for asked in fake.asked] == [one for one in read for _ in "12"]
    assert [choice["index"] for choice in said["choices"]] == list(range(2 * len(read)))
    assert said["usage"]["prompt_tokens"] == sum(map(len, read))


def test_every_prompt_starts_with_the_same_seed(client, fake) -> None:
    client.post("/v1/completions", json=body(["a", "b"], n=2, seed=5))
    assert [asked["seed"] for asked in fake.asked] == [5, 6, 5, 6]


def test_a_prompt_may_be_echoed(client) -> None:
    said = client.post("/v1/completions", json=body(["a", "b"], echo=True)).json()
    assert [choice["text"] for choice in said["choices"]] == ["aHello", "bHello"]
    said = client.post("/v1/completions", json=body([97], echo=True)).json()
    assert said["choices"][0]["text"] == "aHello"
    chunks = events(client.post("/v1/completions", json=body(echo=True, stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Say", "Hel", "lo", ""]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("best_of", 2, "best_of=2 must be equal to n, which is 1"),
        ("prompt", "", "none of them empty"),
        ("prompt", [1, "a"], "prompt[1]: must be a valid integer"),
        ("prompt", [-1], "prompt[0]: must be greater than or equal to 0"),
        ("prompt", ["a"] * 33, "at most 32 items"),
        ("prompt", 7, "up to 32 of either"),
        ("prompt", ["a", ""], "prompt[1]: must have at least 1 character"),
        ("prompt", [[1], []], "prompt[1]: must have at least 1 item"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(client, field, value, message) -> None:
    refused = client.post("/v1/completions", json=body(**{field: value}))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"].partition("[")[0] == field and message in error["message"]


def test_more_answers_than_the_queue_holds_are_refused(client) -> None:
    refused = client.post("/v1/completions", json=body(["a"] * 10, n=2))
    assert refused.status_code == 400
    assert "20 answers; this server allows 18" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("max_waiting", "most"), [(0, 1), (1, 1), (2, 2), (3, 3), (8, 5)])
def test_a_tenant_among_others_may_ask_for_what_its_share_of_the_queue_holds(
    serve_fake, fake, max_waiting, most
) -> None:
    config = {**vars(fake.config), "max_running": 1, "max_waiting": max_waiting}
    fake.config = SimpleNamespace(**config)
    client = serve_fake(keys=parse_keys(["ann:k-ann", "bob:k-bob"], "test"))
    headers = {"authorization": "Bearer k-ann"}
    for n, status in ((most, 200), (most + 1, 400)):
        asked = {"model": "fake", "prompt": "a", "n": n}
        assert client.post("/v1/completions", json=asked, headers=headers).status_code == status
