"""Errors about bodies: the field they name, and their words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from kvboost.serve.anthropic.requests import MessagesRequest
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import parse
from kvboost.serve.http.problems import LONGEST_SHOWN, shown
from kvboost.serve.openai_responses.requests import ResponseRequest
from kvboost.serve.schema.embeddings import EmbeddingRequest, RerankRequest
from kvboost.serve.schema.fields import BodyContext
from kvboost.serve.schema.generation import ReuseOptions
from kvboost.serve.schema.own import (
    ChatPlan,
    CompletionPlan,
    ForgetRequest,
    ForgetSalt,
    LoadAdapter,
    PinIds,
    PinRequest,
    UnloadAdapter,
    WarmRequest,
)
from kvboost.serve.schema.requests import ChatRequest, CompletionRequest


def refusal(model: Any, body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(TypeAdapter(model), json.dumps(body).encode(), BodyContext(strict=True))
    return caught.value


def schema(properties: int) -> dict[str, Any]:
    return {"properties": {f"p{number}": {"type": "string"} for number in range(properties)}}


def nested(depth: int) -> Any:
    return {"not": nested(depth - 1)} if depth else "x"


def needed(model: Any) -> dict[str, Any]:
    """The fields that a body of ``model`` must have; none if it is a union of models."""
    given: dict[str, Any] = {"model": "m", **chat(TEXT), "max_tokens": 1, "token_ids": [1]}
    texts = dict.fromkeys(("input", "prompt", "query", "cache_salt", "lora_name", "lora_path"), "x")
    given |= {"documents": ["x"], **texts}
    fields = getattr(model, "model_fields", {})
    return {name: given[name] for name, field in fields.items() if field.is_required()}


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
            f"{PART}: must be a block of one of the types text, document, search_result, image",
        ),
        (ChatRequest, {**chat(TEXT), "kvboost": {"session_ttl": 5}}, "session_ttl goes with"),
        (
            ResponseRequest,
            {"model": "m", "input": "x", "text": {"format": {"type": "x"}}},
            "text.format: 'type' must be one of",
        ),
        (
            ChatRequest,
            {**chat(TEXT), "guided_json": {"allOf": [schema(1000)] * 5}},
            "guided_json has more than 8,192 JSON values",
        ),
        (
            ChatRequest,
            {**chat(TEXT), "guided_json": nested(33)},
            "guided_json is nested deeper than 32 lists and objects",
        ),
        (
            MessagesRequest,
            {**chat(TEXT), "max_tokens": 1, "tools": [{"name": "f", "input_schema": schema(5000)}]},
            "tools[0].input_schema has an object of 5,000 properties; at most 1,024 are allowed",
        ),
        (PinRequest, {"text": "x", "token_ids": [1]}, "with one of 'text', 'token_ids' and"),
        (PinRequest, {"ttl": 1}, "with one of 'text', 'token_ids' and 'document_id'"),
        (ForgetRequest, {"text": "x", "cache_salt": "y"}, "either 'text' or 'cache_salt'"),
    ],
)
def test_errors_speak_of_json_and_not_of_our_classes(model, body, message) -> None:
    assert message in refusal(model, body).message


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (ChatRequest, {"temperature": 9}, "temperature: must be less than or equal to 2, not 9"),
        (ChatRequest, {"temperature": "hot"}, "temperature: must be a valid number, not 'hot'"),
        (ChatRequest, {"n": 1.5}, "n: must be a valid integer, not 1.5"),
        (ChatRequest, {"stream": None, "logprobs": 3}, "logprobs: must be a valid boolean, not 3"),
        (ChatRequest, {"user": True}, "user: must be a valid string, not true"),
        (ChatRequest, {"logit_bias": {"abc": 1}}, "must match the pattern ^[0-9]{1,9}$, not 'abc'"),
        (ChatRequest, {"cache_salt": "x" * 600}, "must have at most 512 characters, not 600"),
        (ChatRequest, {"messages": [3]}, "messages[0]: must be an object, not 3"),
        (ChatRequest, {"guided_json": "{"}, "guided_json: must be a JSON schema: input data was"),
        (ChatRequest, {"kvboost": {"heal": "x"}}, "must be 'auto', 'idle' or 'off', not 'x'"),
        (ChatRequest, chat({"type": "poem"}), 'types text, document, not {"type": "poem"}'),
        (ChatRequest, {"chat_template_kwargs": {"a": [1, 2]}}, "valid number, not [1, 2]"),
        (CompletionRequest, {"prompt": {"a": None}}, 'none of them empty, not {"a": null}'),
        (ResponseRequest, {"temperature": -1}, "must be greater than or equal to 0, not -1"),
        (MessagesRequest, {"max_tokens": 0}, "must be greater than or equal to 1, not 0"),
        (EmbeddingRequest, {"input": []}, "none of them empty, not []"),
        (PinRequest, {"text": "x", "ttl": -1}, "not -1"),
    ],
)
def test_an_error_says_what_was_sent(model, body, message) -> None:
    assert message in refusal(model, {**needed(model), **body}).message


@pytest.mark.parametrize(
    "model",
    [
        *(ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest, EmbeddingRequest),
        *(RerankRequest, ReuseOptions, WarmRequest, ChatPlan, CompletionPlan, PinIds, ForgetSalt),
        *(LoadAdapter, UnloadAdapter),
    ],
)
@pytest.mark.parametrize("value", [-7654321, "no such value", {"odd": True}])
def test_every_field_of_every_api_names_the_value_that_it_refuses(model, value) -> None:
    """All but those whose value does not matter: they are not supported."""
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    refused = 0
    for name, field in model.model_fields.items():
        body = {**needed(model), field.alias or name: value}
        try:
            parse(adapter, json.dumps(body).encode(), BodyContext(strict=True))
        except ApiError as error:
            if error.code == "invalid_value" and error.param == name:
                refused += 1
                assert shown(value) in error.message
    assert refused or isinstance(value, str)


@pytest.mark.parametrize(
    "long",
    ["x" * 10**6, ["x"] * 10**5, {"x" * 999: 1}, 10**390],
    ids=["text", "list", "object", "number"],
)
def test_long_values_and_names_are_cut_short(long) -> None:
    error = refusal(ChatRequest, {**chat(TEXT), "temperature": long})
    assert error.message.endswith(("...", "...'")) and len(error.message) < 2 * LONGEST_SHOWN
    error = refusal(ChatRequest, {**chat(TEXT), "x" * 10**6: 1})
    assert error.param is not None and len(error.param) <= LONGEST_SHOWN
