"""Ollama's chat and generate over an engine without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvboost.errors import QueueFullError
from kvboost.serve.ollama.replies import OllamaChatReply, OllamaErrorReply, OllamaGenerateReply
from kvboost.serve.settings import ApiKey

FUNCTION = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
ASK = [{"role": "user", "content": "hi"}]


def chat(client, headers: dict[str, str] | None = None, **more: Any):
    asked = {"model": "fake", "messages": ASK, "stream": False, **more}
    return client.post("/api/chat", json=asked, headers=headers)


def generate(client, **more: Any):
    asked = {"model": "fake", "prompt": "hi", "stream": False, **more}
    return client.post("/api/generate", json=asked)


def lines(answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_whole_chat(client, fake) -> None:
    options = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7, "num_predict": 9}
    options |= {"stop": ["!"], "repeat_penalty": 1.2, "num_ctx": 4096}
    answer = chat(client, options=options, keep_alive="5m")
    assert answer.status_code == 200 and answer.headers["x-kvboost-computed-tokens"] == "7"
    said = OllamaChatReply.model_validate(answer.json())
    assert said.message.content == "Hello" and said.message.thinking is None
    assert (said.model, said.done, said.done_reason) == ("fake", True, "stop")
    assert (said.prompt_eval_count, said.eval_count) == (7, 2)
    assert said.kvboost.computed_tokens == 7 and said.kvboost.notes == []
    (asked,) = fake.asked
    assert {name: asked[name] for name in ("temperature", "top_p", "top_k", "seed", "max")} == {
        **{name: options[name] for name in ("temperature", "top_p", "top_k", "seed")},
        "max": 9,
    }
    assert asked["stop"] == ["!"] and asked["repetition_penalty"] == 1.2


def test_defaults_are_ollamas(client, fake) -> None:
    answer = client.post("/api/chat", json={"model": "fake", "messages": ASK})
    assert len(lines(answer)) == 3  # it streams
    assert fake.asked[0]["temperature"] == 0.8
    for unlimited in (-1, 0):
        chat(client, options={"num_predict": unlimited, "seed": -1})
        assert fake.asked[-1]["max"] == 93 and "seed" not in fake.asked[-1]  # 100 - 7


def test_a_stream_has_an_object_per_line_and_the_counts_in_the_last(client) -> None:
    *pieces, last = lines(chat(client, stream=True))
    assert [one["message"] for one in pieces] == [
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    assert [one["done"] for one in pieces] == [False, False] and "eval_count" not in pieces[0]
    said = OllamaChatReply.model_validate(last)
    assert said.done and said.message.content == "" and said.eval_count == 2


@pytest.mark.usefixtures("calls")
def test_thinking_and_calls(client) -> None:
    said = OllamaChatReply.model_validate(chat(client, tools=[TOOL]).json())
    assert (said.message.thinking, said.message.content) == ("hm", "I look.")
    (call,) = said.message.tool_calls
    function = {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
    assert call["function"] == function and call["id"].startswith("call_")
    *pieces, _ = [one["message"] for one in lines(chat(client, tools=[TOOL], stream=True))]
    assert "".join(one.get("thinking", "") for one in pieces) == "hm"
    assert "".join(one["content"] for one in pieces) == "I look."
    (called,) = [one["tool_calls"] for one in pieces if "tool_calls" in one]
    assert [one["function"] for one in called] == [function]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_not_made(client, fake, stream: bool) -> None:
    fake.pieces, fake.finish_reason = fake.pieces[:-2], "length"
    answer = chat(client, tools=[TOOL], stream=stream)
    *_, last = lines(answer) if stream else [answer.json()]
    assert last["done_reason"] == "length" and "tool_calls" not in answer.text


def test_messages_and_tools_reach_the_template(client, fake) -> None:
    fake.context_length = None
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    assert chat(client, messages=messages, tools=[TOOL], think="low").status_code == 200
    (conversation,) = fake.conversations
    system, user, called, result = conversation.messages
    assert system["content"] == "Be brief." and user == ASK[0]
    assert called["reasoning_content"] == "hm"
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert (result["name"], result["content"]) == ("weather", "sunny")
    assert conversation.tools == [TOOL] and not conversation.continue_final_message
    assert conversation.template_options == {"enable_thinking": True, "reasoning_effort": "low"}


def test_the_beginning_of_an_answer_is_continued(client, fake) -> None:
    chat(client, messages=[*ASK, {"role": "assistant", "content": "Well,"}], think=False)
    (conversation,) = fake.conversations
    assert conversation.continue_final_message
    assert conversation.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("given", "schema"),
    [("json", {"type": "object"}), ({"type": "array"}, {"type": "array"}), ("", None)],
)
def test_formats(client, fake, given, schema) -> None:
    assert chat(client, format=given).status_code == 200
    assert generate(client, format=given, raw=True).status_code == 200
    assert [asked.get("schema") for asked in fake.asked] == [schema, schema]


def test_log_probabilities(client) -> None:
    said = chat(client, logprobs=True, top_logprobs=1).json()
    assert [one["logprob"] for one in said["logprobs"]] == [-0.5, -0.5]
    streamed = lines(chat(client, logprobs=True, stream=True))
    assert [one["logprob"] for line in streamed for one in line.get("logprobs", ())] == [-0.5] * 2
    assert "logprobs" not in chat(client, top_logprobs=1).json()


def test_generate_uses_the_chat_template_unless_it_is_raw(client, fake) -> None:
    said = OllamaGenerateReply.model_validate(generate(client, system="Be brief.").json())
    assert (said.response, said.prompt_eval_count) == ("Hello", 23)
    (conversation,) = fake.conversations
    assert conversation.messages == [{"role": "system", "content": "Be brief."}, *ASK]
    *pieces, last = lines(generate(client, raw=True, stream=True))
    assert bytes(fake.asked[-1]["prompt"]) == b"hi" and len(fake.conversations) == 1
    assert [one["response"] for one in pieces] == ["Hel", "lo"]
    assert last["done"] and last["response"] == ""
    assert fake.asked[-1]["max"] == 98  # not the 16 of OpenAI's completions


def test_generate_fills_in_the_middle_if_the_model_can(client, fake) -> None:
    refused = generate(client, suffix="!")
    assert refused.status_code == 400
    assert "cannot fill in the middle" in OllamaErrorReply.model_validate(refused.json()).error
    fake.fills_in = True
    assert generate(client, suffix="!").json()["response"] == "Hello"
    assert bytes(fake.asked[-1]["prompt"]) == b"hi\0!"


def test_without_a_question_the_model_is_loaded(client, fake) -> None:
    said = OllamaChatReply.model_validate(chat(client, messages=[], keep_alive=0).json())
    assert said.done and said.done_reason == "load"
    OllamaGenerateReply.model_validate(generate(client, prompt="", keep_alive=-1).json())
    assert fake.asked == []


def test_names_may_have_the_tag_latest(client, serve_fake) -> None:
    assert chat(client, model="fake:latest").json()["model"] == "fake:latest"
    missed = chat(client, model="other:latest")
    assert missed.status_code == 404 and "there is fake" in missed.json()["error"]
    assert chat(client, model="fake:7b").status_code == 404
    tagged = serve_fake(served_names=("qwen:latest",))
    assert chat(tagged, model="qwen:latest").status_code == 200


def test_bodies_need_no_content_type(client) -> None:
    body = json.dumps({"model": "fake", "messages": ASK}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d sends it
    assert client.post("/api/chat", content=body, headers=form).status_code == 200
    assert client.post("/v1/chat/completions", content=body, headers=form).status_code == 415
    foreign = {**form, "origin": "https://evil.example"}
    refused = client.post("/api/chat", content=body, headers=foreign)
    assert refused.status_code == 403 and "evil.example" in refused.json()["error"]


def test_keys_are_needed_and_are_tenants(serve_fake, fake) -> None:
    client = serve_fake(keys=(ApiKey("a", "key-a"), ApiKey("b", "key-b")))
    for key in ("a", "b"):
        assert chat(client, {"authorization": f"Bearer key-{key}"}).status_code == 200
    one, other = fake.asked
    assert (one["tenant"], other["tenant"]) == ("a", "b")
    assert one["cache_salt"] != other["cache_salt"]
    for refused in (chat(client), client.get("/api/tags"), client.get("/api/version")):
        assert refused.status_code == 401
        OllamaErrorReply.model_validate(refused.json())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"messages": [{**ASK[0], "images": ["x"]}]}, "messages[0].images: images are not"),
        ({"messages": [{**ASK[0], "thinking": "x"}]}, "thinking goes with the role assistant"),
        ({"messages": [{**ASK[0], "tool_call_id": "1"}]}, "tool_call_id goes with the role tool"),
        ({"think": "huge"}, "think: must be"),
        ({"format": "xml"}, "format: must be"),
        ({"tools": [TOOL, TOOL]}, "two of them have the same name"),
        ({"options": {"temperature": 3}}, "options.temperature: must be"),
        ({"model": None}, "model is missing"),
    ],
)
def test_chat_refuses_what_it_cannot_honour(client, more, said: str) -> None:
    refused = chat(client, **more)
    assert refused.status_code == 400
    assert said in OllamaErrorReply.model_validate(refused.json()).error


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"context": [1, 2]}, "send the conversation to /api/chat"),
        ({"template": "{{ .Prompt }}"}, "send raw=true"),
        ({"system": "x", "raw": True}, "system does not go with raw"),
        ({"images": ["x"]}, "images are not supported"),
    ],
)
def test_generate_refuses_what_it_cannot_honour(client, more, said: str) -> None:
    refused = generate(client, **more)
    assert refused.status_code == 400
    assert said in OllamaErrorReply.model_validate(refused.json()).error
    empty = {name: type(value)() for name, value in more.items()}
    assert generate(client, **empty).status_code == 200


def test_other_options_are_left_out_with_a_note_or_refused(client, serve_fake) -> None:
    (note,) = chat(client, options={"mirostat": 1}).json()["kvboost"]["notes"]
    assert "mirostat" in note
    refused = chat(serve_fake(strict_fields=True), options={"mirostat": 1})
    assert refused.status_code == 400 and "options.mirostat" in refused.json()["error"]


def test_all_errors_have_ollamas_form(client, fake) -> None:
    told = [client.get("/api/chat"), client.post("/api/pull", json={"model": "x"})]
    fake.refuse = QueueFullError(9, 3)
    told.append(chat(client))
    assert [one.status_code for one in told] == [405, 404, 429]
    for one in told:
        OllamaErrorReply.model_validate(one.json())
    assert told[-1].headers["retry-after"] == "3"


def test_a_stream_that_fails_says_so(client, fake) -> None:
    fake.pieces = ["Hel", RuntimeError("secret")]
    first, last = lines(chat(client, stream=True))
    assert first["message"]["content"] == "Hel"
    assert set(last) == {"error"} and "secret" not in last["error"]
