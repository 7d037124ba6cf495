"""What OpenAI's APIs keep: ``cache_control`` and ``prompt_cache_retention``. The engine has no
model; its prompts are ``role:content`` of each message, one token per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvboost.model.loading.tokenizer import ModelTokenizer
from support.chat_templates import tokenizer_with

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL = {"type": "function", "function": {"name": "weather"}}
SYSTEM = {"role": "system", "content": "sys"}
HI = {"role": "user", "content": "hi"}
DAY = 24 * 3600
TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"


def post(client, path: str = "/v1/chat/completions", **more: Any):
    given = {"input": "hi"} if path == "/v1/responses" else {"messages": [SYSTEM, HI]}
    return client.post(path, json={"model": "fake", **given, **more})


def ask(client, path: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    answer = post(client, path, **more)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def kept(fake) -> list[tuple[bytes, float]]:
    return [(bytes(ids), fake.pinned[name].ttl) for name, ids in fake.pinned_ids.items()]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{**SYSTEM, **MARK}, HI]}, [(b"system:sysuser:", 300)]),
        (
            {"messages": [{**SYSTEM, "content": [{"type": "text", "text": "sys", **HOUR}]}, HI]},
            [(b"system:sysuser:", 3600)],
        ),
        ({"tools": [{**TOOL, **MARK}]}, [(b"system:sysuser:", 300)]),
        ({"messages": [HI], "tools": [{**TOOL, **MARK}]}, [(b"user:", 300)]),
        (HOUR, [(b"system:sysuser:hi", 3600)]),
        (
            {"messages": [{**SYSTEM, **HOUR}, {**HI, **MARK}]},
            [(b"system:sysuser:", 3600), (b"system:sysuser:hi", 300)],
        ),
        ({"stream": True, **MARK}, [(b"system:sysuser:hi", 300)]),
        ({"n": 2, **MARK}, [(b"system:sysuser:hi", 300)]),
        ({}, []),
    ],
    ids=["message", "part", "tool", "tools alone", "end", "two", "stream", "n", "none"],
)
def test_marks_of_a_chat_are_kept(client, fake, body, expected) -> None:
    answer = post(client, **body)
    assert answer.status_code == 200 and "left out" not in answer.text
    assert kept(fake) == expected


def test_marks_reach_the_engine_before_the_prompt_is_read(client, fake) -> None:
    ask(client, messages=[{**SYSTEM, **MARK}, HI])
    assert fake.asked[-1]["marks"] == [len("system:sysuser:")]
    ask(client, **MARK)  # at the end, where states are kept in any case
    assert "marks" not in fake.asked[-1]


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "GLM-4.6", "gpt-oss-120b", "DeepSeek-V3.1"])
@pytest.mark.parametrize("asks_again", [False, True])
def test_a_mark_holds_in_templates_that_leave_out_reasoning(
    client, fake, monkeypatch, name: str, asks_again: bool
) -> None:
    """They write it between the calls of the last turn only. The mark is at the first of two
    results, or at that result while the user has asked again."""
    tokenizer = tokenizer_with((TEMPLATES / f"{name}.jinja").read_text())
    render = ModelTokenizer(tokenizer).render_chat
    monkeypatch.setattr(fake, "render", lambda one: render(one.messages, tools=one.tools))
    fake.context_length = None
    calls = [
        [
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": f"Thought {number} about the weather.",
                "tool_calls": [
                    {
                        "id": f"t{number}",
                        "type": "function",
                        "function": {"name": "weather", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": f"t{number}", "content": f"result {number}"},
        ]
        for number in range(2)
    ]
    calls[0][1] |= MARK
    end = {"role": "assistant", "content": "Fine.", "reasoning_content": "Thought 2."}
    more = [end, {"role": "user", "content": "More?"}] if asks_again else []
    tool = {**TOOL, "function": {"name": "weather", "description": "The weather"}}
    ask(client, messages=[SYSTEM, HI, *calls[0], *calls[1], *more], tools=[tool])
    ((pinned, _),) = kept(fake)
    prompt = bytes(fake.asked[-1]["prompt"])
    assert prompt.startswith(pinned) and pinned.count(b"result") == 1
    assert prompt[len(pinned) :].find(b"result 0") < 0 and b"Thought 2" not in prompt
    assert b"Thought 1" in prompt[len(pinned) :] or b"Thought 1" not in prompt


@pytest.mark.parametrize("wrong", [{"type": "ephemeral", "ttl": "2h"}, {"type": "forever"}])
def test_a_wrong_mark_of_a_chat_is_refused(client, wrong) -> None:
    refused = post(client, messages=[{**HI, "cache_control": wrong}])
    place = "ttl" if "ttl" in wrong else "type"
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"messages[0].cache_control.{place}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_conversation_is_kept_for_a_day(client, fake, path: str) -> None:
    said = ask(client, path, prompt_cache_retention="24h", prompt_cache_key="k")
    assert said["kvboost"]["notes"] == []
    pinned = [one for name, one in fake.pinned.items() if name.startswith("session-")]
    assert [pin.ttl for pin in pinned] == [DAY]
    (session,) = client.get("/kvboost/sessions").json()["data"]
    assert session["id"].startswith("kept-") and DAY - 60 < session["expires_in"] <= DAY
    assert client.delete(f"/kvboost/sessions/{session['id']}").json()["deleted"]


def test_the_next_turn_takes_the_place_of_the_last_one(client, fake) -> None:
    """Also where the system prompt is edited. Another key or first message is another
    conversation."""
    turns = [HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "more"}]
    day = {"prompt_cache_retention": "24h"}
    ask(client, **day, stream=False)
    ask(client, **day, messages=[{**SYSTEM, "content": "edited"}, *turns])
    ((ids, _),) = kept(fake)
    assert ids.startswith(b"system:editeduser:hi")
    ask(client, **day, prompt_cache_key="other")
    ask(client, **day, messages=[{"role": "user", "content": "else"}])
    assert len(kept(fake)) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("value", ["in_memory", "in-memory", None])
def test_in_memory_is_the_default(client, path: str, value) -> None:
    said = ask(client, path, prompt_cache_retention=value, prompt_cache_key="k")
    assert said["kvboost"]["notes"] == []
    assert client.get("/kvboost/sessions").json()["data"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("wrong", ["48h", "", 24])
def test_an_unknown_retention_is_refused(client, path: str, wrong) -> None:
    refused = post(client, path, prompt_cache_retention=wrong)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "prompt_cache_retention"
    assert "'in_memory'" in error["message"] and "'24h'" in error["message"]


def test_the_operator_limits_how_long(serve_fake, fake) -> None:
    said = ask(serve_fake(retention_seconds=3600), prompt_cache_retention="24h")
    note = "prompt_cache_retention: this server keeps a conversation for at most 3600 s"
    assert said["kvboost"]["notes"] == [note] and kept(fake)[0][1] == 3600
    said = ask(serve_fake(retention_seconds=0), prompt_cache_retention="24h")
    note = "prompt_cache_retention: this server keeps no conversations"
    assert said["kvboost"]["notes"] == [note] and len(kept(fake)) == 1


def test_a_session_of_the_request_is_the_one_that_is_kept(client, fake) -> None:
    day = {"prompt_cache_retention": "24h"}
    ask(client, **day, kvboost={"session": "mine"})
    ask(client, **day, kvboost={"session": "brief", "session_ttl": 60})
    shown = client.get("/kvboost/sessions").json()["data"]
    assert [one["id"] for one in shown] == ["mine", "brief"]
    assert [ttl for _, ttl in kept(fake)] == [DAY, 60]
