"""Chat completions, in the shapes OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import pytest

from live_server import events

MESSAGES = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": MESSAGES, **more}


def test_an_answer_in_one_piece(client) -> None:
    answer = client.post("/v1/chat/completions", json=body())
    assert answer.status_code == 200
    said = answer.json()
    assert said["id"].startswith("chatcmpl-") and said["object"] == "chat.completion"
    assert said["model"] == "fake"
    (choice,) = said["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert said["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert said["kvboost"]["computed_tokens"] == 7
    assert "text" not in said["kvboost"]["spans"][0]
    assert answer.headers["x-kvboost-computed-tokens"] == "7"
    assert float(answer.headers["x-kvboost-ttft-ms"]) > 0


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client) -> None:
    answer = client.post("/v1/chat/completions", json=body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1:] == [{"content": "Hel"}, {"content": "lo"}, {}]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert [("kvboost" in chunk) for chunk in chunks] == [False, False, False, True]
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_last_when_it_is_asked_for(client) -> None:
    asked = body(stream=True, stream_options={"include_usage": True})
    *chunks, last = events(client.post("/v1/chat/completions", json=asked).text)
    assert all(chunk["usage"] is None and "kvboost" not in chunk for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert last["kvboost"]["computed_tokens"] == 7


def test_several_answers_have_seeds_of_their_own(client, fake) -> None:
    answer = client.post("/v1/chat/completions", json=body(n=3, seed=2**63 - 2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [asked["seed"] for asked in fake.asked] == [2**63 - 2, 2**63 - 1, 0]
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 6
    assert all(choice["kvboost"]["computed_tokens"] == 7 for choice in answer["choices"])


def test_several_streamed_answers_are_told_apart(client) -> None:
    chunks = events(client.post("/v1/chat/completions", json=body(n=2, stream=True)).text)
    for index in (0, 1):
        mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert "".join(one["delta"].get("content", "") for one in mine) == "Hello"
        assert mine[-1]["finish_reason"] == "stop"
    assert "kvboost" in chunks[-1]


def test_an_answer_may_be_empty(client, fake) -> None:
    fake.pieces = ()
    whole = client.post("/v1/chat/completions", json=body()).json()
    assert whole["choices"][0]["message"]["content"] == ""
    chunks = events(client.post("/v1/chat/completions", json=body(stream=True)).text)
    assert len(chunks) == 2 and chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_what_was_asked_reaches_the_engine(client, fake) -> None:
    asked = body(
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        max_completion_tokens=9,
        max_tokens=11,
        cache_salt="s",
        kvboost={"mode": "prefix_cache", "strategy": "query", "ratio": 0.5},
        logprobs=True,
        top_logprobs=3,
    )
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
    assert fake.asked == [
        {
            "prompt": list(b"user:hi"),
            "max": 9,
            "mode": "prefix_cache",
            "timeout": 600.0,
            "cache_salt": "s",
            "seed": None,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["a", "b"],
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "logit_bias": {7: -100.0},
            "logprobs": 3,
            "recompute_strategy": "query",
            "recompute_ratio": 0.5,
        }
    ]


def test_defaults_are_openais(client, fake) -> None:
    client.post("/v1/chat/completions", json=body())
    (asked,) = fake.asked
    assert asked["temperature"] == 1.0 and "top_p" not in asked and "logprobs" not in asked
    assert asked["max"] == 93  # what a context of 100 still holds behind 7


def test_parts_and_developers_become_what_templates_know(client, fake) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
    ]
    client.post("/v1/chat/completions", json=body(messages=messages))
    assert bytes(fake.asked[0]["prompt"]) == b"system:be kinduser:a\nbassistant:c"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tools", [], "tools is not supported"),
        ("functions", [{}], "functions is not supported"),
        ("modalities", ["text"], "modalities is not supported"),
        ("service_tier", "flex", "service_tier is not supported"),
        ("store", True, "true is not supported"),
        ("response_format", {"type": "json_object"}, "must be 'text'"),
        ("nonsense", 1, "nonsense is not a field"),
        ("n", 9, "less than or equal to 8"),
        ("n", True, "must be a valid integer"),
        ("temperature", "1", "must be a valid number"),
        ("temperature", 2.5, "less than or equal to 2"),
        ("stop", ["a"] * 5, "up to 4"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("top_logprobs", 3, "goes with logprobs"),
        ("stream_options", {}, "goes with stream=true"),
        ("logit_bias", {"1": 101}, "less than or equal to 100"),
        ("messages", [], "at least 1"),
        ("seed", "seven", "valid integer"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(client, field, value, message) -> None:
    refused = client.post("/v1/chat/completions", json=body(**{field: value}))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0] == field
    assert message in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "me"}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
    ],
)
def test_a_wrong_message_is_named(client, message, param) -> None:
    refused = client.post("/v1/chat/completions", json=body(messages=[message]))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_a_null_is_as_good_as_nothing(client) -> None:
    asked = body(tools=None, n=None, stop=None, logprobs=None, response_format={"type": "text"})
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
