"""Errors about bodies: the field they name, and their words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from kvboost.serve.anthropic.request_models import MessagesRequest
from kvboost.serve.bodies import parse
from kvboost.serve.errors import ApiError
from kvboost.serve.openai_responses.request_models import ResponseRequest
from kvboost.serve.request_documents import PinRequest
from kvboost.serve.request_models import ChatRequest, ForgetRequest


def refusal(model: Any, body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(TypeAdapter(model), json.dumps(body).encode())
    return caught.value


def schema(properties: int) -> dict[str, Any]:
    return {"properties": {f"p{number}": {"type": "string"} for number in range(properties)}}


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [part]}]}


TEXT = {"type": "text", "text": "x"}
PART = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (ChatRequest, chat({**TEXT, "more": 1}), f"{PART}.more"),
        (ChatRequest, chat({**TEXT, "text": 1}), f"{PART}.text"),
        (ChatRequest, chat({"type": "text"}), f"{PART}.text"),
        (MessagesRequest, {**chat({**TEXT, "more": 1}), "max_tokens": 1}, f"{PART}.more"),
        (
            MessagesRequest,
            {**chat({**TEXT, "cache_control": {"type": "x"}}), "max_tokens": 1},
            f"{PART}.cache_control.type",
        ),
        (PinRequest, {"text": "x", "ttl": -1}, "ttl"),
        (PinRequest, {"text": 1}, "text"),
        (PinRequest, {"token_ids": [1, "x"]}, "token_ids[1]"),
        (PinRequest, {"document_id": "x", "header": "h"}, "header"),
    ],
)
def test_the_field_is_named_though_a_branch_has_the_name_of_another(model, body, param) -> None:
    error = refusal(model, body)
    assert error.param == param and error.message.startswith(param)


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (ChatRequest, [], "the body: must be an object"),
        (ChatRequest, {"model": "m", "messages": []}, "must have at least 1 item, not 0"),
        (
            ChatRequest,
            {**chat(TEXT), "response_format": {"type": "xml"}},
            "'type' must be one of 'text', 'json_object', 'json_schema', not 'xml'",
        ),
        (ChatRequest, {**chat(TEXT), "response_format": {}}, "must have a field 'type'"),
        (ChatRequest, chat({"type": "poem"}), "a part of one of the types text, document"),
        (
            MessagesRequest,
            {**chat({"type": "poem"}), "max_tokens": 1},
            f"{PART}: must be a block of one of the types text, thinking, tool_use, tool_result",
        ),
        (ChatRequest, {**chat(TEXT), "kvboost": {"session_ttl": 5}}, "session_ttl goes with"),
        (
            ResponseRequest,
            {"model": "m", "input": "x", "text": {"format": {"type": "x"}}},
            "text.format: 'type' must be one of",
        ),
        (
            ChatRequest,
            {**chat(TEXT), "guided_json": schema(5000)},
            "guided_json has more than 8,192 JSON values",
        ),
        (
            MessagesRequest,
            {**chat(TEXT), "max_tokens": 1, "tools": [{"name": "f", "input_schema": schema(5000)}]},
            "tools[0].input_schema has more than 8,192 JSON values",
        ),
        (PinRequest, {"text": "x", "token_ids": [1]}, "with one of 'text', 'token_ids' and"),
        (PinRequest, {"ttl": 1}, "with one of 'text', 'token_ids' and 'document_id'"),
        (ForgetRequest, {"text": "x", "cache_salt": "y"}, "either 'text' or 'cache_salt'"),
    ],
)
def test_errors_speak_of_json_and_not_of_our_classes(model, body, message) -> None:
    assert message in refusal(model, body).message
