"""Items as chat messages."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from kvboost.serve.openai_responses.items import Item, messages_of


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    read = TypeAdapter(list[Item]).validate_python(list(items))
    return [message.for_template(str) for message in messages_of(read)]


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "id": "m", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": "r", "summary": [], "content": [part]}


def call(number: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": number, "name": "now", "arguments": ""}


def test_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(
        {"role": "developer", "content": "x"}, {"type": "message", "role": "user", "content": parts}
    ) == [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}]


def test_reasoning_text_and_calls_are_one_message() -> None:
    (message,) = messages(thought("hm"), said("I look."), call("1"), call("2"))
    assert message["role"] == "assistant" and message["content"] == "I look."
    assert message["reasoning_content"] == "hm"
    assert [one["id"] for one in message["tool_calls"]] == ["1", "2"]


def test_a_new_message_begins_where_the_order_does() -> None:
    told = messages(call("1"), said("a"), said("b"), thought("hm"), call("2"))
    assert [message["content"] for message in told] == ["", "a", "b", ""]
    assert told[3]["reasoning_content"] == "hm" and told[3]["tool_calls"][0]["id"] == "2"


def test_results_are_messages_of_tools() -> None:
    result = {"type": "function_call_output", "call_id": "1", "output": "noon", "name": "now"}
    _, told, user = messages(call("1"), result, {"role": "user", "content": "?"})
    assert told == {"role": "tool", "content": "noon", "tool_call_id": "1", "name": "now"}
    assert user == {"role": "user", "content": "?"}
