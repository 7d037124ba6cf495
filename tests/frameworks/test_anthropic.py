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
    client = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0, timeout=300)
    try:
        client.messages.create(model=server.model, max_tokens=1, messages=MESSAGES)
    except anthropic.NotFoundError:
        pytest.skip("the server has no /v1/messages")
    return client


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
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "any"},
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls[0].name == "weather" and calls[0].input["city"] in ("Paris", "Rome")
    assert answer.stop_reason == "tool_use"
    has_run("anthropic", "tools, `tool_choice` any")
