"""Bodies of clients that are not run here, and how they read what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream of server-sent events, up to ``[DONE]``."""
    with httpx.stream("POST", url, json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")
