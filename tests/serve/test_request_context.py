"""``context_management`` of requests, over a real engine with a tiny model: in the server's own
process, and in an API process, which has the chat template and no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
from kvboost.chat.context_edits import CLEARED, THINKING, TOOL_USES
from kvboost.serve.anthropic.replies import AnthropicErrorReply, MessageReply, TokenCount
from kvboost.serve.schema.replies import ChatCompletion, ErrorReply
from support.chat_templates import QWEN, tokenizer_with
from support.live_server import events, live_server
from support.remote_server import remote_server
from support.sse import named_events
from support.tiny import tiny_model

TEMPLATE = QWEN.replace(
    "'assistant:' + (message.content or '')",
    "'assistant:' + (message.reasoning_content or '') + (message.content or '')",
)
RESULTS = [
    "".join(f"Ship {31 * number + 7 * one} passed at {one} in night {number}. " for one in range(8))
    for number in range(4)
]
ASK = "Which ships pass?"
EDITS = {
    "edits": [
        {"type": THINKING},
        {
            "type": TOOL_USES,
            "trigger": {"type": "tool_uses", "value": 3},
            "keep": {"type": "tool_uses", "value": 3},
            "clear_tool_inputs": True,
        },
    ]
}


def chat_messages() -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, result in enumerate(RESULTS):
        called = {"name": "log", "arguments": f'{{"night": {number}}}'}
        messages += [
            {"role": "user", "content": ASK},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": f"I look it up: {number}. ",
                "tool_calls": [{"id": f"t{number}", "type": "function", "function": called}],
            },
            {"role": "tool", "tool_call_id": f"t{number}", "content": result},
        ]
    return messages


def blocks() -> list[dict[str, Any]]:
    """The same conversation in Anthropic's form."""
    messages: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, result in enumerate(RESULTS):
        messages += [
            {"role": "user", "content": [*results, {"type": "text", "text": ASK}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"I look it up: {number}. ", "signature": ""},
                    {
                        "type": "tool_use",
                        "id": f"t{number}",
                        "name": "log",
                        "input": {"night": number},
                    },
                ],
            },
        ]
        results = [{"type": "tool_result", "tool_use_id": f"t{number}", "content": result}]
    return [*messages, {"role": "user", "content": results}]


@pytest.fixture(scope="module", params=[live_server, remote_server], ids=["here", "api_process"])
def client(request) -> Iterator[httpx.Client]:
    model = tiny_model("llama", max_position_embeddings=2048)
    options = {"chunk_size": 16, "reuse_moved": "always"}
    with (
        KVBoost.from_model(model, tokenizer_with(TEMPLATE), **options) as engine,
        request.param(engine, served_names=("tiny",)) as server,
        httpx.Client(base_url=server.url, timeout=120) as made,
    ):
        yield made


def post(client: httpx.Client, path: str, **more: Any) -> httpx.Response:
    if path.startswith("/v1/messages"):
        limit = {} if path.endswith("count_tokens") else {"max_tokens": 2}
        given = {"messages": blocks(), **limit}
    else:
        given = {"messages": chat_messages(), "max_tokens": 2}
    return client.post(path, json={"model": "tiny", **given, **more})


def ask(client: httpx.Client, path: str, **more: Any) -> dict[str, Any]:
    answer = post(client, path, **more)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def tokens(said: dict[str, Any]) -> int:
    """Those of the prompt of an answer."""
    usage = said["usage"]
    cached = ("cache_creation_input_tokens", "cache_read_input_tokens")
    prompt: int = usage.get("prompt_tokens") or usage["input_tokens"] + sum(
        usage[name] for name in cached
    )
    return prompt


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_an_answer_says_what_was_cleared(client, path: str) -> None:
    whole = ask(client, path)
    assert "context_management" not in whole
    said = ask(client, path, context_management=EDITS)
    (MessageReply if path == "/v1/messages" else ChatCompletion).model_validate(said)
    thinking, tools = said["context_management"]["applied_edits"]
    assert thinking == {
        "type": THINKING,
        "cleared_thinking_turns": 3,
        "cleared_input_tokens": 3 * len("I look it up: 0. "),
    }
    cleared = len(RESULTS[0]) - len(CLEARED) + len('"night": 0')
    expected = {"type": TOOL_USES, "cleared_tool_uses": 1, "cleared_input_tokens": cleared}
    assert tools == expected
    assert tokens(whole) - tokens(said) == cleared + thinking["cleared_input_tokens"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_an_answer_says_that_nothing_was_cleared(client, path: str) -> None:
    for edits in ({}, {"edits": []}, {"edits": [{"type": TOOL_USES}]}):
        said = ask(client, path, context_management=edits)
        assert said["context_management"] == {"applied_edits": []}
    assert "context_management" not in ask(client, path, context_management=None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_text_after_a_cleared_result_is_not_computed_again(client, path: str) -> None:
    """The conversation is read as it is; then the first of its results is cleared."""
    options = {"cache_salt": path, "temperature": 0}
    assert ask(client, path, **options)["kvboost"]["moved_tokens"] == 0
    said = ask(client, path, **options, context_management={"edits": EDITS["edits"][1:]})
    found = said["kvboost"]
    assert found["exact_tokens"] > len(ASK)
    assert found["moved_tokens"] > sum(map(len, RESULTS[1:]))
    assert found["computed_tokens"] < 4 * len(CLEARED)


def test_streams_say_it_at_their_end(client) -> None:
    whole = ask(client, "/v1/messages", context_management=EDITS)["context_management"]
    streamed = named_events(
        post(client, "/v1/messages", context_management=EDITS, stream=True).text
    )
    told = [one for one in streamed if "context_management" in one]
    assert [one["type"] for one in told] == ["message_delta"]
    assert told[0]["context_management"] == whole
    for usage in (None, {"include_usage": True}):
        answer = post(
            client,
            "/v1/chat/completions",
            context_management=EDITS,
            stream=True,
            stream_options=usage,
        )
        chunks = events(answer.text)
        told = [one for one in chunks if "context_management" in one]
        assert told == chunks[-1:] and told[0]["context_management"] == whole


def test_counting_tokens_after_the_edits(client) -> None:
    path = "/v1/messages/count_tokens"
    whole = ask(client, path)
    edited = ask(client, path, context_management=EDITS)
    TokenCount.model_validate(edited)
    said = ask(client, "/v1/messages", context_management=EDITS)
    assert edited["input_tokens"] == tokens(said) < whole["input_tokens"]
    assert edited["context_management"] == {"original_input_tokens": whole["input_tokens"]}
    assert "context_management" not in whole


def test_marked_text_is_that_of_the_edited_conversation(client) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    said = ask(client, "/v1/messages", context_management=EDITS, **mark, cache_salt="marked")
    usage = said["usage"]
    assert usage["cache_creation_input_tokens"] == tokens(said) and usage["input_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_marked_text_ends_with_the_marked_message(client, path: str) -> None:
    """What is pinned ends before what the next message says, a call of ``log``. In Anthropic's
    form, a result is in one message with the question after it."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    if path == "/v1/messages":
        messages = blocks()
        messages[4]["content"][0] |= mark
    else:
        messages = chat_messages()
        messages[6] |= mark
    salt = f"marks {path}"
    ask(client, path, messages=messages, context_management=EDITS, cache_salt=salt)
    (pin,) = [one for one in client.get("/kvboost/pins").json()["data"] if one["ttl"] > 600]
    listed = ask(client, "/tokenize", context_management=EDITS)
    text = client.post("/detokenize", json={"tokens": listed["tokens"]}).json()["prompt"]
    end = text.index(ASK, text.index(RESULTS[1])) + len(ASK)
    assert CLEARED in text and end <= pin["tokens"] <= text.index('log"', end)
    assert client.delete(f"/kvboost/pins/{pin['name']}").status_code == 200


def test_a_conversation_may_be_too_long_before_it_is_edited(client) -> None:
    """The context has 2,048 tokens."""
    messages = chat_messages()
    messages[2]["content"] = "so many ships " * 500
    refused = post(client, "/v1/chat/completions", messages=messages)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    said = ask(client, "/v1/chat/completions", messages=messages, context_management=EDITS)
    assert said["context_management"]["applied_edits"][1]["cleared_input_tokens"] > 6000
    messages[2]["content"] = "so many ships " * 20_000
    refused = post(client, "/v1/chat/completions", messages=messages, context_management=EDITS)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "a conversation to edit may have up to 16 times as many" in error["message"]


def test_plans_and_tokens_are_those_of_the_edited_conversation(client) -> None:
    said = ask(client, "/v1/chat/completions", context_management=EDITS)
    planned = ask(client, "/kvboost/plan", context_management=EDITS)
    listed = ask(client, "/tokenize", context_management=EDITS)
    assert planned["prompt_tokens"] == listed["count"] == tokens(said)


WRONG: dict[str, tuple[Any, str, str]] = {
    "unknown edit": (
        {"edits": [{"type": "compact_20260112"}]},
        "edits[0].type",
        "edits[0].type='compact_20260112' is no edit that KVBoost knows; use {'type': 'clear_tool_",
    ),
    "order": (
        {"edits": [{"type": TOOL_USES}, {"type": THINKING}]},
        "edits",
        f"put {THINKING} first",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_refused_by_name(client, case: str) -> None:
    given, place, said = WRONG[case]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = post(client, path, context_management=given)
        error = AnthropicErrorReply.model_validate(refused.json()).error
        assert refused.status_code == 400 and error.type == "invalid_request_error"
        assert error.message.startswith("context_management: edits") and said in error.message
    refused = post(client, "/v1/chat/completions", context_management=given)
    detail = ErrorReply.model_validate(refused.json()).error
    assert refused.status_code == 400 and said in detail.message
    assert (detail.param, detail.code) == (f"context_management.{place}", "invalid_value")
