"""Chat completions, in OpenAI's format."""

from __future__ import annotations

from typing import Any

import pytest

from support.live_server import events

MESSAGES = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": MESSAGES, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_a_whole_answer(client) -> None:
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
        "prompt_tokens_details": {"cached_tokens": 0, "exact_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert said["kvboost"]["computed_tokens"] == 7
    assert "text" not in said["kvboost"]["spans"][0]
    assert answer.headers["x-kvboost-computed-tokens"] == "7"
    assert float(answer.headers["x-kvboost-ttft-ms"]) > 0


def test_a_stream_begins_with_the_role_and_ends_with_the_finish_reason(client) -> None:
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


def test_include_usage_adds_a_last_chunk(client) -> None:
    asked = body(stream=True, stream_options={"include_usage": True})
    *chunks, last = events(client.post("/v1/chat/completions", json=asked).text)
    assert all(chunk["usage"] is None and "kvboost" not in chunk for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert last["kvboost"]["computed_tokens"] == 7


def test_each_of_several_answers_has_its_own_seed(client, fake) -> None:
    answer = client.post("/v1/chat/completions", json=body(n=3, seed=2**63 - 2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [asked["seed"] for asked in fake.asked] == [2**63 - 2, 2**63 - 1, 0]
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 6
    assert all(choice["kvboost"]["computed_tokens"] == 7 for choice in answer["choices"])


def test_streamed_answers_have_their_index(client) -> None:
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


def test_all_options_reach_the_engine(client, fake) -> None:
    asked = body(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        stop=["a", "b"],
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        max_completion_tokens=9,
        max_tokens=11,
        cache_salt="s",
        kvboost={
            "mode": "prefix_cache",
            "strategy": "query",
            "ratio": 0.5,
            "reuse_moved": "always",
            "heal": "off",
            "exactness": "verified",
            "speculate": 8,
        },
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
            "tenant": "",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "stop": ["a", "b"],
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "logit_bias": {7: -100.0},
            "logprobs": 3,
            "recompute_strategy": "query",
            "recompute_ratio": 0.5,
            "reuse_moved": "always",
            "heal": "off",
            "exactness": "verified",
            "speculate": 8,
        }
    ]


def test_defaults_are_those_of_openai(client, fake) -> None:
    client.post("/v1/chat/completions", json=body())
    (asked,) = fake.asked
    assert asked["temperature"] == 1.0 and "top_p" not in asked and "logprobs" not in asked
    assert asked["max"] == 93  # a context of 100, less the 7 tokens of the prompt


def test_what_litellm_adds_to_an_answer_may_be_sent_back(client, fake) -> None:
    noted = {"role": "assistant", "content": "b", "provider_specific_fields": {"refusal": None}}
    messages = [{"role": "user", "content": "a"}, noted, {"role": "user", "content": "c"}]
    answer = client.post("/v1/chat/completions", json=body(messages=messages))
    assert answer.json()["kvboost"]["notes"] == []
    assert bytes(fake.asked[0]["prompt"]) == b"user:aassistant:buser:c"


def test_parts_and_developers_are_rewritten_for_the_template(client, fake) -> None:
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
        ("tools", [{"type": "function"}], "tools[0].function is missing"),
        ("tools", [{"type": "web_search"}], "tools[0].type: must be 'function'"),
        ("tools", [tool("a"), tool("a")], "two of them have the same name"),
        ("tools", [tool("a b")], "tools[0].function.name: must match the pattern"),
        ("functions", [{}], "functions is not supported"),
        ("modalities", ["audio"], "modalities[0]: must be 'text'"),
        ("tool_choice", "required", "tool_choice goes with tools"),
        ("tool_choice", "always", "must be 'none', 'auto' or 'required'"),
        ("tool_choice", 3, "must be 'none', 'auto', 'required' or {'type': 'function'"),
        ("reasoning_effort", "very", "must be 'none', 'minimal', 'low'"),
        ("chat_template", "{{ x }}", "chat_template is not supported"),
        ("use_beam_search", True, "true is not supported"),
        ("best_of", 2, "must be 1"),
        ("thinking", {"type": "hard"}, "must be 'enabled', 'adaptive' or 'disabled'"),
        ("metadata", {str(n): "x" for n in range(17)}, "17 entries; at most 16"),
        ("response_format", {"type": "json_schema"}, "json_schema is missing"),
        ("guided_choice", [], "at least 1 item"),
        ("n", True, "must be a valid integer"),
        ("temperature", "1", "must be a valid number"),
        ("stop", ["a"] * 65, "at most 64 items"),
        ("top_logprobs", 3, "goes with logprobs"),
        ("stream_options", {}, "goes with stream=true"),
        ("logit_bias", {"1": 101}, "less than or equal to 100"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(client, field, value, message) -> None:
    refused = client.post("/v1/chat/completions", json=body(**{field: value}))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0].partition("[")[0] == field
    assert message in error["message"]


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ({"role": "robot", "content": "x"}, "role", "must be 'system'"),
        ({"role": "user", "content": None}, "content", "is missing"),
        ({"role": "user", "content": 3}, "content", "must be a string or a list of parts"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id", "the role tool"),
        ({"role": "user"}, "content", "is missing"),
        ({"role": "user", "content": []}, "content", "at least 1 item"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "tool_calls[0].function",
            "is missing",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "content[0].type",
            "images are not supported",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "content[0].type",
            "audio is not supported",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "is missing"),
        ({"role": "user", "content": ["x"]}, "content[0]", "must be an object"),
    ],
)
def test_an_error_about_a_message_names_its_wrong_field(client, message, param, told) -> None:
    messages = [*MESSAGES, message]
    refused = client.post("/v1/chat/completions", json=body(messages=messages))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == f"messages[1].{param}" and told in error["message"]


def test_top_k_is_off_at_minus_one(client, fake) -> None:
    client.post("/v1/chat/completions", json=body(top_k=-1))
    assert fake.asked[0]["top_k"] == 0
