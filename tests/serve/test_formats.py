"""Formats of answers, through OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from kvboost import KVBoost
from support.tiny import make_engine, tiny_model

ASK: Any = [{"role": "user", "content": "Who?"}]


class Person(BaseModel):
    name: Annotated[str, Field(max_length=4)]
    kind: Literal["poet", "king"]
    years: Annotated[list[Annotated[int, Field(ge=1, le=9)]], Field(max_length=2)]


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama", max_position_embeddings=2048)) as engine:
        yield engine


def test_the_client_parses_its_model(openai: OpenAI) -> None:
    answer = openai.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Person, temperature=1.5, seed=4, max_tokens=200
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and answer.choices[0].finish_reason == "stop"


def test_a_streamed_model_is_the_same(openai: OpenAI) -> None:
    with openai.chat.completions.stream(
        model="tiny", messages=ASK, response_format=Person, seed=4, max_tokens=200
    ) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("more", "matches"),
    [
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
    ],
)
def test_vllms_names(openai: OpenAI, more, matches: str) -> None:
    chat = openai.chat.completions.create(model="tiny", messages=ASK, extra_body=more)
    assert re.fullmatch(matches, chat.choices[0].message.content)
    text = openai.completions.create(model="tiny", prompt="Say", extra_body=more)
    assert re.fullmatch(matches, text.choices[0].text)


def test_a_format_or_a_call(openai: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "now"}}
    seen = set()
    for seed in range(12):
        message = openai.chat.completions.create(
            model="tiny", messages=ASK, tools=[tool], seed=seed, temperature=2.0,
            extra_body={"guided_choice": ["yes"]},
        ).choices[0].message  # fmt: skip
        assert (message.content == "yes") != bool(message.tool_calls)
        seen.add(message.content)
    assert seen == {"yes", None}


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "a", "schema": {"type": "array", "uniqueItems": True}}}},
            "response_format", 'response_format cannot be enforced: Unimplemented keys: ["uniqueI',
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "what"}, "guided_grammar", "cannot be enforced"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "give one format"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
         "guided_regex does not go with response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice",
         "give one format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "not": {}}}}]}, "tools", "tools cannot be enforced"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named(openai: OpenAI, more, param: str, said: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai.chat.completions.create(model="tiny", messages=ASK, extra_body=more)
    assert refused.value.param == param and said in refused.value.message


def test_without_llguidance_the_error_says_why(openai: OpenAI, monkeypatch) -> None:
    reason = "llguidance 1.6.1 is installed, and 1.9 is needed"
    monkeypatch.setattr("kvboost.structured.library.missing", lambda: reason)
    with pytest.raises(BadRequestError, match=reason):
        openai.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"guided_regex": "nobody asked this before"}
        )


def test_a_format_is_no_part_of_a_plan(engine: KVBoost) -> None:
    """A plan is about the prompt alone."""
    from starlette.testclient import TestClient

    from kvboost.serve.app import create_app

    with TestClient(create_app(engine)) as client:
        asked = {"messages": ASK, "guided_regex": "a+"}
        planned = client.post("/kvboost/plan", json=asked, headers={"host": "localhost"})
        assert planned.status_code == 200, planned.text
        assert json.loads(planned.text)["prompt_tokens"] > 0
