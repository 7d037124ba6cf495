"""Anthropic's Messages API over an engine without a model."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import QueueFullError
from kvboost.serve.anthropic.replies import AnthropicErrorReply, MessageReply
from kvboost.serve.settings import ApiKey
from support.sse import named_events

WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK = [{"role": "user", "content": "hi"}]
MARK = {"cache_control": {"type": "ephemeral"}}


def create(client, headers: dict[str, str] | None = None, **more: Any):
    asked = {"model": "fake", "max_tokens": 9, "messages": ASK, **more}
    return client.post("/v1/messages", json=asked, headers=headers)


def test_a_whole_message(client, fake) -> None:
    answer = create(client, system="Be brief.", temperature=0, top_p=0.5, top_k=3)
    assert answer.status_code == 200
    said = MessageReply.model_validate(answer.json())
    assert said.id.startswith("msg_") and said.model == "fake"
    (text,) = said.content
    assert text.type == "text" and text.text == "Hello"
    assert said.stop_reason == "end_turn" and said.stop_sequence is None
    assert said.usage.input_tokens == 23 and said.usage.output_tokens == 2
    assert said.kvboost.computed_tokens == 23
    (conversation,) = fake.conversations
    assert conversation.messages == [{"role": "system", "content": "Be brief."}, *ASK]
    (asked,) = fake.asked
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max"]) == (0, 0.5, 3, 9)


def results(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}] * count}


def uses(count: int) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    return {"role": "assistant", "content": [block] * count}


@pytest.mark.parametrize(
    ("messages", "system", "said"),
    [
        (ASK * 8192, "Be brief.", "messages must have at most 8,192 items, not 8,193"),
        ([results(4096)] * 3, None, "messages must have at most 8,192 items, not 12,288"),
        ([*ASK, uses(129), results(1)], None, "tool_calls must have at most 128 items, not 129"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_more_than_a_chat_request_may_have_is_refused(
    client, path: str, messages: list[Any], system: str | None, said: str
) -> None:
    """These used to fail with 500: only the translated request exceeds the limit."""
    asked = {"model": "fake", "messages": messages, "system": system}
    asked |= {"max_tokens": 9} if path == "/v1/messages" else {}
    refused = client.post(path, json=asked)
    assert refused.status_code == 400
    assert said in AnthropicErrorReply.model_validate(refused.json()).error.message


def test_the_events_of_a_stream(client) -> None:
    events = named_events(create(client, stream=True).text)
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] == 7 and message["usage"]["output_tokens"] == 0
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    assert [event["delta"]["text"] for event in events[3:5]] == ["Hel", "lo"]
    assert events[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[6]["usage"]["output_tokens"] == 2


@pytest.mark.usefixtures("calls")
def test_thinking_text_and_calls_are_blocks(client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    said = create(client, tools=[WEATHER], thinking=thinking).json()
    MessageReply.model_validate(said)
    thought, text, call = said["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text["text"] == "I look."
    assert call["id"].startswith("toolu_") and call["input"] == {"city": "Rome"}
    assert said["stop_reason"] == "tool_use"
    events = named_events(create(client, tools=[WEATHER], stream=True).text)
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "hm"}
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"city": "Rome"}'
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.usefixtures("calls")
def test_an_answer_that_is_cut_off_says_so(client, fake) -> None:
    fake.pieces, fake.finish_reason = fake.pieces[:-2], "length"
    said = create(client, tools=[WEATHER]).json()
    assert said["stop_reason"] == "max_tokens" and said["content"][2]["input"] == {}


def test_the_stop_sequence_that_ended_an_answer(client, fake, monkeypatch) -> None:
    monkeypatch.setattr(fake, "decode", lambda ids: "Hello##more")
    said = create(client, stop_sequences=["!", "##"]).json()
    assert fake.asked[0]["stop"] == ["!", "##"]
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "##")
    said = create(client, stop_sequences=["!"]).json()
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)


def test_blocks_reach_the_template_as_messages(client, fake) -> None:
    fake.context_length = None
    used = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                used,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [{"type": "text", "text": "sunny"}],
                },
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    answer = create(client, messages=messages, system=system, tools=[WEATHER])
    assert answer.status_code == 200
    (conversation,) = fake.conversations
    first, _, said, no, sunny, user = conversation.messages
    assert first == {"role": "system", "content": "x\ny"}
    assert said["content"] == "I look." and said["reasoning_content"] == "hm"
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert no == {"role": "tool", "content": "Error: no", "tool_call_id": "1", "name": ""}
    assert sunny["content"] == "sunny" and user == {"role": "user", "content": "a\nb"}
    (tool,) = conversation.tools
    assert tool["function"] == {"name": "weather", "parameters": WEATHER["input_schema"]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "weather"}, ("required", "weather", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_choices_of_tools(client, fake, choice, expected) -> None:
    assert create(client, tools=[WEATHER], tool_choice=choice).status_code == 200
    (use,) = fake.uses
    assert (use.choice, use.named, use.parallel) == expected


def test_models_think_only_if_they_are_asked_to(client, fake) -> None:
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive"}):
        create(client, thinking=thinking)
    asked = [conversation.template_options for conversation in fake.conversations]
    assert [options["enable_thinking"] for options in asked] == [False, False, True]
    create(client, output_config={"effort": "high"})
    assert fake.conversations[-1].template_options["reasoning_effort"] == "high"


def test_marked_text_is_kept(client, fake) -> None:
    """The fake engine's prompts are ``role:content`` of each message, one token per byte."""
    system = [{"type": "text", "text": "sys", **MARK}]
    usage = create(client, system=system).json()["usage"]
    assert usage == {
        "input_tokens": 2,  # the beginning of any question belongs to what was marked
        "cache_creation_input_tokens": 15,
        "cache_read_input_tokens": 0,
        "output_tokens": 2,
    }
    assert [bytes(ids) for ids in fake.pinned_ids.values()] == [b"system:sysuser:"]
    turns = [*ASK, {"role": "user", "content": [{"type": "text", "text": "more", **MARK}]}]
    usage = create(client, system=system, messages=turns).json()["usage"]
    assert usage["input_tokens"] == 0 and usage["cache_creation_input_tokens"] == 26
    pinned = fake.pinned_ids
    assert [bytes(ids) for ids in pinned.values()] == [b"system:sysuser:hiuser:more"]
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    create(client, tools=[{**WEATHER, **hour}], system="other", **MARK)
    _, *others = (bytes(ids) for ids in pinned.values())
    assert others == [b"system:otheruser:", b"system:otheruser:hi"]


def test_counting_tokens(client, fake) -> None:
    asked = {"model": "fake", "messages": ASK, "system": "sys"}
    answer = client.post("/v1/messages/count_tokens", json=asked)
    assert answer.json() == {"input_tokens": 17} and fake.asked == []


def test_keys_may_come_as_x_api_key(serve_fake) -> None:
    client = serve_fake(keys=(ApiKey("a", "key-a"), ApiKey("b", "key-b")))
    assert create(client, {"x-api-key": "key-a"}).status_code == 200
    assert create(client, {"authorization": "Bearer key-b"}).status_code == 200
    assert create(client, {"authorization": "Bearer x", "x-api-key": "key-a"}).status_code == 401
    for headers in ({}, {"x-api-key": "wrong"}):
        refused = create(client, headers)
        assert refused.status_code == 401
        assert AnthropicErrorReply.model_validate(refused.json()).error.type == (
            "authentication_error"
        )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"output_config": {"effort": "hard"}}, "output_config.effort"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [*ASK, {"role": "assistant", "content": "I "}]}, "must not end with blanks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {
                "type": "base64", "media_type": "application/pdf", "data": "x"}}]}]},
            "messages[0].content[0].source: must be a source of the type text or content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "citations": {
                "enabled": True}, "source": {"type": "text", "data": "x"}}]}]},
            "citations.enabled: true is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: images are not supported",
        ),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "tool_result", "tool_use_id": "1"}]}, *ASK]},
            "tool_result block goes with the role user",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(client, more, said: str) -> None:
    refused = create(client, **more)
    assert refused.status_code == 400
    error = AnthropicErrorReply.model_validate(refused.json())
    assert error.error.type == "invalid_request_error" and said in error.error.message
    assert error.request_id == refused.headers["x-request-id"]


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_thread_is_refused_so_that_the_client_sends_whole_conversations(client, thread) -> None:
    refused = create(client, thread=thread)
    assert refused.status_code == 400
    error = AnthropicErrorReply.model_validate(refused.json()).error
    assert error.details is not None
    assert error.details.error_code == "thread_unsupported_request"
    assert error.details.unsupported == ["thread"] and "thread" in error.message
    assert "details" not in create(client, max_tokens=None).json()["error"]


def test_all_errors_have_anthropics_form(client, fake) -> None:
    told = [create(client, model="other"), client.get("/v1/messages")]
    fake.refuse = QueueFullError(9, 3)
    told.append(create(client))
    kinds = [AnthropicErrorReply.model_validate(one.json()).error.type for one in told]
    assert kinds == ["not_found_error", "invalid_request_error", "rate_limit_error"]
    assert told[-1].headers["retry-after"] == "3"
    assert set(client.get("/v1/completions").json()) == {"error"}


def test_a_stream_that_fails_says_so(client, fake) -> None:
    fake.pieces = ["Hel", RuntimeError("secret")]
    *_, last = named_events(create(client, stream=True).text)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "secret" not in str(last)


def test_documents_and_search_results_are_text(client, fake) -> None:
    fake.context_length = None
    plain = {"type": "text", "media_type": "text/plain", "data": "It is lit."}
    parts = {"type": "content", "content": [{"type": "text", "text": "a"}]}
    found = {
        "type": "search_result",
        "source": "https://light.example",
        "title": "Lights",
        "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
    }
    blocks = [
        {"type": "document", "source": plain, "title": "Light", "citations": {"enabled": False}},
        {"type": "document", "source": parts, "context": "old", **MARK},
        found,
        {"type": "text", "text": "Why?"},
    ]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [found]}
    call = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert create(client, messages=messages).status_code == 200
    first, _, last = fake.conversations[-1].messages
    search = "Lights\nhttps://light.example\n\nb\nc"
    assert first["content"] == f"Light\n\nIt is lit.\nold\n\na\n{search}\nWhy?"
    assert last["content"] == search


def test_the_beginning_of_an_answer_is_continued(client, fake) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Well,"}]
    said = create(client, messages=messages).json()
    assert fake.conversations[0].continue_final_message
    assert said["content"] == [{"type": "text", "text": "Hello"}]
    create(client)
    assert not fake.conversations[-1].continue_final_message
