"""OpenAI's own client."""

from __future__ import annotations

import json

import openai
import pytest

from support.client_bodies import TOOL
from support.questions import NOTES, Verdict


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)


def test_chat_stream_and_cached_tokens(client, server, has_run) -> None:
    messages = [
        {"role": "system", "content": NOTES},
        {"role": "user", "content": "When was it lit?"},
    ]
    first = client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=8, temperature=0
    )
    assert first.choices[0].message.content
    pieces = client.chat.completions.create(
        model=server.model,
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == first.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 100
    has_run("openai", "chat, streaming, cached tokens")


def test_structured_output(client, server, has_run) -> None:
    answer = client.chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": "Think of an animal."}],
        response_format=Verdict,
        max_tokens=64,
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    has_run("openai", "`chat.completions.parse` with a pydantic model")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_tool_is_called_and_its_result_read(client, server, has_run, choice) -> None:
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    asked = client.chat.completions.create(
        model=server.model, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=64
    )
    (call,) = asked.choices[0].message.tool_calls[:1]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages += [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model=server.model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert answer.choices[0].message.content
    has_run("openai", f"tools, `tool_choice` {'required' if choice == 'required' else 'named'}")


def test_context_overflow_is_a_bad_request(client, server, has_run) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=server.model, prompt=[5] * 200_000)
    assert caught.value.code == "context_length_exceeded"
    has_run("openai", "errors")


def test_responses(client, server, has_run) -> None:
    answer = client.responses.create(
        model=server.model, input="Say something.", max_output_tokens=8
    )
    assert answer.output_text
    events = client.responses.create(
        model=server.model, input="Say something.", max_output_tokens=16, stream=True
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    has_run("openai", "Responses, streamed too")
