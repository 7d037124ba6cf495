"""What Open WebUI sends, and what it reads of the answers.

Written down from the wheel of open-webui 0.12.4: routers/openai.py (``get_all_models``,
``generate_chat_completion``, ``convert_to_responses_payload``), routers/tasks.py, main.py
(``stream_options``), utils/payload.py (parameters of a model), utils/misc.py
(``convert_output_to_messages``), utils/response.py (``normalize_usage``) and utils/middleware.py
(the reading of streams).
"""

from __future__ import annotations

import json

import httpx

from support.client_bodies import TOOL, post, streamed

VERSION = "0.12.4"
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a lighthouse for?"},
]
USAGE = {"stream_options": {"include_usage": True}}
PARAMETERS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.05,
    "max_tokens": 8,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "reasoning_effort": "low",
    "seed": 7,
    "stop": ["\n\n\n"],
    "logit_bias": {"42": -100},
    "response_format": {"type": "text"},
    # Its settings have these for Ollama, and send them to every server.
    "top_k": 40,
    "repeat_penalty": 1.1,
}
CALL = {"id": "call_1", "type": "function", "index": 0}
CALLED = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def test_the_list_of_models(server, has_run) -> None:
    """It shows the id as the name unless there is one, and drops a name that is null."""
    told = httpx.get(f"{server.url}/models", headers={"Authorization": "Bearer none"}).json()
    (model,) = told["data"]
    assert model["id"] == server.model and "name" not in model and "error" not in told
    has_run("open-webui", "models", VERSION)


def test_a_chat_streams_with_usage(server, knows_every_field, has_run) -> None:
    body = {"stream": True, "model": server.model, "messages": MESSAGES, **USAGE, **PARAMETERS}
    *chunks, last = streamed(f"{server.url}/chat/completions", body)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert last["choices"] == [] and not any(chunk["usage"] for chunk in chunks)
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    has_run("open-webui", "chat, streaming, usage, all parameters of a model", VERSION)


def test_a_title(server, knows_every_field, has_run) -> None:
    """Tasks (titles, tags, queries) are one message, not streamed; their content is read."""
    task = {
        "model": server.model,
        "messages": [{"role": "user", "content": 'Give a title as JSON: {"title": "..."}'}],
        "stream": False,
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = post(f"{server.url}/chat/completions", task)
    assert answer["choices"][0]["message"]["content"] and "error" not in answer
    assert answer["usage"]["completion_tokens"] <= 12
    has_run("open-webui", "titles", VERSION)


def test_tools_are_called_in_a_stream_and_their_results_read(
    server, knows_every_field, has_run
) -> None:
    body = {"stream": True, "model": server.model, **USAGE, "max_tokens": 64, "tools": [TOOL]}
    forced = {**body, "messages": MESSAGES, "tool_choice": "required"}
    calls: dict[int, dict[str, str]] = {}
    for chunk in streamed(f"{server.url}/chat/completions", forced):
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"id": call.get("id"), "arguments": ""})
                known["arguments"] += call["function"].get("arguments") or ""
                known["name"] = call["function"].get("name") or known["name"]
    assert calls[0]["id"] and calls[0]["name"] == "weather"
    assert json.loads(calls[0]["arguments"])["city"] in ("Paris", "Rome")
    more = {**body, "messages": CALLED, "tool_choice": "none", "max_tokens": 8}
    chunks = list(streamed(f"{server.url}/chat/completions", more))
    assert any(choice["delta"].get("content") for one in chunks for choice in one["choices"])
    has_run("open-webui", "tools, streamed", VERSION)


def test_an_answer_is_continued(server, knows_every_field, has_run) -> None:
    """What its button "Continue" sends to a server of the kind llama.cpp."""
    body = {
        "stream": True,
        "model": server.model,
        "messages": [*MESSAGES, {"role": "assistant", "content": "A lighthouse warns ships of"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 8,
        "temperature": 0,
    }
    said = [chunk["choices"][0] for chunk in streamed(f"{server.url}/chat/completions", body)]
    text = "".join(one["delta"].get("content") or "" for one in said)
    assert text and not text.startswith("A lighthouse")
    has_run("open-webui", "continued answers", VERSION)


def test_the_same_over_the_responses_api(server, knows_every_field, has_run) -> None:
    body = {
        "stream": True,
        "model": server.model,
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 7,
        "instructions": MESSAGES[0]["content"],
        "max_output_tokens": 8,
        "tools": [{"type": "function", **TOOL["function"], "strict": False}],
        "tool_choice": "none",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": MESSAGES[1]["content"]}],
            },
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city": "Rome"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
    }
    with httpx.stream("POST", f"{server.url}/responses", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    ended = events[-1]["response"]
    assert text and text == ended["output"][0]["content"][0]["text"]
    assert ended["usage"]["input_tokens"] and ended["usage"]["output_tokens"] <= 8
    has_run("open-webui", "Responses, streamed, with a tool's result", VERSION)
