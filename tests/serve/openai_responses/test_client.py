"""OpenAI's client over the Responses API, on a tiny model."""

from __future__ import annotations

import json
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel

from kvboost import KVBoost

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
OPTIONS: Any = {"model": "tiny", "seed": 3, "chat_template_kwargs": {"enable_thinking": False}}


class City(BaseModel):
    name: Literal["Rome", "Oslo"]


def create(client: OpenAI, **given: Any) -> Any:
    return client.responses.create(model="tiny", extra_body=OPTIONS, **given)


def test_a_whole_round(openai: OpenAI, engine: KVBoost) -> None:
    """The model calls a tool, gets the result and goes on; what it has read is pinned, and not
    read again."""
    first = create(
        openai, input="Rain?", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = first.output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    pinned = engine.cache_stats()["pinned"]
    assert pinned > 0
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = create(
        openai, input=[result], previous_response_id=first.id, tools=[WEATHER], max_output_tokens=4
    )
    assert second.usage.input_tokens_details.cached_tokens > 200
    assert openai.responses.retrieve(second.id).output == second.output
    for response in (first, second):
        openai.responses.delete(response.id)
    assert engine.cache_stats()["pinned"] == 0


def test_a_format(openai: OpenAI) -> None:
    answer = openai.responses.parse(
        model="tiny", input="A city?", text_format=City, store=False, extra_body=OPTIONS
    )
    assert answer.output_parsed is not None and answer.output_parsed.name in ("Rome", "Oslo")


def test_clients_put_a_stream_together(openai: OpenAI) -> None:
    with openai.responses.stream(
        model="tiny",
        input="Rain?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        store=False,
        extra_body=OPTIONS,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    (call,) = final.output
    assert call.type == "function_call" and "city" in json.loads(call.arguments)
