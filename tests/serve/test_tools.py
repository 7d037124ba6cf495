"""Tools, through OpenAI's client and over the wire."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kvboost import KVBoost
from kvboost.chat.tool_use import ToolUse
from support.chat_templates import BEGUN, tokenizer_with
from support.fake_engine import FakeEngine
from support.live_server import connect, events, live_server, read_until, wait_for
from support.tiny import tiny_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "Rain in Rome?"}]


def ask(client: OpenAI, **options: Any) -> Any:
    given = {"messages": ASK, "tools": [WEATHER, NOW], "max_tokens": 300, **options}
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    return client.chat.completions.create(model="tiny", extra_body=template, **given)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_whole_round(openai: OpenAI) -> None:
    """The model calls a tool, gets the result and goes on, and the tools are not read again."""
    first = ask(openai, tool_choice=named("weather"), seed=3).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and first.message.content is None
    assert call.id.startswith("call_") and call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*ASK, first.message, result]
    second = ask(openai, messages=turns, tool_choice="none", max_tokens=4)
    assert second.choices[0].finish_reason in ("length", "stop")
    third = ask(openai, messages=turns, max_tokens=4)
    assert third.usage.prompt_tokens_details.cached_tokens > 200


def test_streamed_deltas_make_the_same_call(openai: OpenAI) -> None:
    options: Any = {"tool_choice": "required", "seed": 5, "temperature": 1.5}
    whole = ask(openai, **options).choices[0].message.tool_calls
    with ask(openai, stream=True, **options) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert chunks[-1].finish_reason == "tool_calls"
    calls: dict[int, dict[str, str]] = {}
    for delta in (call for chunk in chunks for call in chunk.delta.tool_calls or []):
        if delta.id:
            assert delta.index == len(calls) and delta.type == "function"
            calls[delta.index] = {"name": delta.function.name, "arguments": ""}
        calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert list(calls.values()) == [
        {"name": one.function.name, "arguments": one.function.arguments} for one in whole
    ]


def test_clients_put_the_stream_together(openai: OpenAI) -> None:
    with openai.chat.completions.stream(
        model="tiny",
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        reasoning_effort="none",
    ) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_one_call_at_a_time(openai: OpenAI) -> None:
    for seed in range(4):
        answer = ask(openai, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert len(answer.choices[0].message.tool_calls) == 1


def test_n_answers_have_calls_of_their_own(openai: OpenAI) -> None:
    choices = ask(openai, tool_choice="required", n=2, seed=1).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) >= 2


def test_no_tools_are_shown_if_none_may_be_called(openai: OpenAI) -> None:
    with_tools = ask(openai, max_tokens=1).usage.prompt_tokens
    assert ask(openai, max_tokens=1, tool_choice="none").usage.prompt_tokens < with_tools - 100


def test_reasoning_is_apart() -> None:
    """The prompt has opened it, and random weights never close it."""
    model = tiny_model("llama", max_position_embeddings=1024)
    with (
        KVBoost.from_model(model, tokenizer_with(BEGUN)) as engine,
        live_server(engine, served_names=("tiny",)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for more in ({}, {"guided_regex": "[ab]{3}"}):
            answer = client.chat.completions.create(
                model="tiny", messages=ASK, max_tokens=6, temperature=0, extra_body=more
            )
            assert answer.choices[0].message.reasoning_content
            assert answer.choices[0].message.content == ""


def scripted(client: Any, fake: Any, pieces: list[str], **more: Any) -> tuple[Any, list[Any]]:
    """An answer as a whole, and as the chunks of a stream."""
    fake.pieces = pieces
    asked = {"model": "fake", "messages": ASK, **more}
    whole = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    stream = client.post("/v1/chat/completions", json={**asked, "stream": True})
    return whole, [chunk["choices"][0] for chunk in events(stream.text)]


PIECES = [
    "I lo",
    "ok.\n<tool",
    '_call>\n{"name": "weather", "argu',
    'ments": {"ci',
    'ty": "Rome"}}',
    "\n</tool_call>",
]


def test_a_model_that_chooses_to_call(client, fake) -> None:
    whole, chunks = scripted(client, fake, PIECES, tools=[WEATHER])
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "I look."
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    deltas = [chunk["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
    assert len(calls) == 3 and [call["index"] for call in calls] == [0, 0, 0]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_an_answer_that_is_cut_off_says_so(client, fake) -> None:
    fake.finish_reason = "length"
    whole, chunks = scripted(client, fake, PIECES[:-2], tools=[WEATHER])
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'


def test_reasoning_is_streamed_apart(client, fake) -> None:
    fake.thinks = True
    whole, chunks = scripted(client, fake, ["<think>", "hm", "</think>\n\n", "Yes."])
    assert whole["message"]["reasoning_content"] == "hm" and whole["message"]["content"] == "Yes."
    told = [chunk["delta"] for chunk in chunks[1:-1]]
    assert told == [{"reasoning_content": "hm"}, {"content": "Yes."}]


def test_log_probabilities_of_held_back_tokens_come_later(client, fake) -> None:
    fake.vocab_size = 260
    more = {"tools": [WEATHER], "logprobs": True}
    _, chunks = scripted(client, fake, ["a", "<", "b"], **more)
    told = [len(one["logprobs"]["content"]) for one in chunks if one["logprobs"]]
    assert sum(told) == 3


def test_a_format_beside_a_call_that_must_be_made_is_noted(client, fake) -> None:
    asked = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    note = "response_format has no effect: the answer is a call"
    for choice, notes in (("auto", []), ("required", [note])):
        body = {"model": "fake", "messages": ASK, **asked, "tool_choice": choice}
        said = client.post("/v1/chat/completions", json=body).json()
        assert said["kvboost"]["notes"] == notes


def test_messages_about_tools_reach_the_template(client, fake) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]},
    ]
    asked = {"model": "fake", "messages": messages, "tools": [WEATHER], "reasoning_effort": "none"}
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
    (conversation,) = fake.conversations
    _, said, result = conversation.messages
    assert said["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}
    assert said["content"] == "" and said["reasoning_content"] == "hm"
    assert result == {"role": "tool", "content": "noon", "tool_call_id": "1", "name": ""}
    assert "strict" not in conversation.tools[0]["function"]
    assert conversation.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tool_choice": named("rain")}, "tool_choice", "there is no tool rain; there is weather"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "now", "arguments": "{"}}]}]},
         "messages[1].tool_calls[0].function.arguments", "arguments must be JSON text"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(client, more, param: str, said: str) -> None:
    asked = {"model": "fake", "messages": ASK, "tools": [WEATHER], **more}
    refused = client.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param and said in error["message"]


class SlowCompiler(FakeEngine):
    """Compiles no grammar before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.compiling = 0

    def answer_options(
        self, prompt_ids: list[int], use: ToolUse, options: dict[str, Any]
    ) -> dict[str, Any]:
        if "schema" in options:
            self.compiling += 1
            assert self.go_on.wait(60)
        return super().answer_options(prompt_ids, use, options)


def test_tools_without_a_grammar_do_not_wait_for_compilers() -> None:
    fake, chat = SlowCompiler(), "/v1/chat/completions"
    asked = {"model": "fake", "messages": ASK}
    formatted = json.dumps({**asked, "response_format": {"type": "json_object"}}).encode()
    with live_server(fake) as server:
        formats = [connect(server, formatted, path=chat) for _ in range(3)]
        wait_for(lambda: fake.compiling == 2)  # all compilers
        try:
            answer = httpx.post(server.url + chat, json={**asked, "tools": [NOW]}, timeout=20)
        finally:
            fake.go_on.set()
        assert answer.status_code == 200
        for connection in formats:
            with connection:
                read_until(connection, b"Hello")
