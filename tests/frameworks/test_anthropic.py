"""Anthropic's own client."""

from __future__ import annotations

import anthropic
import pytest

TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
MESSAGES = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture
def client(server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0, timeout=300)


def test_messages_and_streams(client, server, has_run) -> None:
    answer = client.messages.create(
        model=server.model, max_tokens=8, system="Be brief.", messages=MESSAGES
    )
    assert answer.content[0].type == "text" and answer.usage.output_tokens
    with client.messages.stream(model=server.model, max_tokens=8, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text
    has_run("anthropic", "messages, streaming")


def test_a_tool_is_called(client, server, has_run) -> None:
    answer = client.messages.create(
        model=server.model,
        max_tokens=64,
        extra_body={"temperature": 0},
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "any"},
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls[0].name == "weather" and calls[0].input["city"] in ("Paris", "Rome")
    assert answer.stop_reason == "tool_use"
    has_run("anthropic", "tools, `tool_choice` any")


def test_context_editing(client, server, has_run) -> None:
    called = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "Sunny, hardly any wind. " * 9}
    asked = {
        "model": server.model,
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": [called]},
            {"role": "user", "content": [result]},
        ],
        "tools": [TOOL],
        "betas": ["context-management-2025-06-27"],
        "context_management": {
            "edits": [
                {"type": "clear_thinking_20251015", "keep": "all"},
                {
                    "type": "clear_tool_uses_20250919",
                    "trigger": {"type": "input_tokens", "value": 10},
                    "keep": {"type": "tool_uses", "value": 0},
                },
            ]
        },
    }
    answer = client.beta.messages.create(max_tokens=4, **asked)
    (edit,) = answer.context_management.applied_edits
    assert edit.type == "clear_tool_uses_20250919" and edit.cleared_tool_uses == 1
    with client.beta.messages.stream(max_tokens=4, **asked) as stream:
        assert stream.get_final_message().context_management == answer.context_management
    counted = client.beta.messages.count_tokens(**asked)
    saved = counted.context_management.original_input_tokens - counted.input_tokens
    assert saved == edit.cleared_input_tokens > 0
    has_run("anthropic", "context editing")
