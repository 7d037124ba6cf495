"""Ollama's own client."""

from __future__ import annotations

import ollama
import pytest

from support.questions import Verdict

MESSAGES = [{"role": "user", "content": "Name an animal."}]
OPTIONS = {"num_predict": 8, "temperature": 0}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: the name of the city
    """
    return f"sunny in {city}"


@pytest.fixture
def client(server) -> ollama.Client:
    return ollama.Client(host=server.root, timeout=300)


def test_chat_and_generate(client, server, has_run) -> None:
    answer = client.chat(model=server.model, messages=MESSAGES, options=OPTIONS)
    assert answer.message.content and answer.done_reason == "length" and answer.eval_count == 8
    parts = list(client.chat(model=server.model, messages=MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert parts[-1].done and parts[-1].prompt_eval_count == answer.prompt_eval_count
    said = client.generate(model=server.model, prompt="Name an animal.", options=OPTIONS)
    assert said.response == answer.message.content
    has_run("ollama", "chat, generate, streaming")


def test_a_schema_is_kept(client, server, has_run) -> None:
    schema = Verdict.model_json_schema()
    options = {"num_predict": 64}
    answer = client.chat(model=server.model, messages=MESSAGES, format=schema, options=options)
    Verdict.model_validate_json(answer.message.content)
    has_run("ollama", "`format` with a pydantic model's schema")


def test_a_tool_is_called(client, server, has_run) -> None:
    """Ollama's API cannot force a call, so the model is told what to write."""
    messages = [{"role": "user", "content": f"Repeat this exactly:\n{CALL}"}]
    options = {"num_predict": 64, "temperature": 0}
    answer = client.chat(model=server.model, messages=messages, tools=[weather], options=options)
    (call,) = answer.message.tool_calls
    assert weather(**call.function.arguments) == "sunny in Rome"
    result = {"role": "tool", "tool_name": call.function.name, "content": "sunny"}
    more = [*messages, answer.message, result]
    again = client.chat(model=server.model, messages=more, tools=[weather], options=OPTIONS)
    assert again.eval_count
    has_run("ollama", "tools")


def test_models_and_embeddings(client, server, has_run) -> None:
    assert [one.model for one in client.list().models] == [f"{server.model}:latest"]
    assert [one.model for one in client.ps().models] == [f"{server.model}:latest"]
    shown = client.show(f"{server.model}:latest")
    assert {"completion", "tools"} <= {*shown.capabilities}
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] > 0
    first, second = client.embed(model=server.model, input=["a lamp", "a ship"]).embeddings
    assert len(first) == len(second) and first != second
    has_run("ollama", "list, ps, show, embed")


def test_errors(client, server, has_run) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'") as missed:
        client.chat(model="other", messages=MESSAGES)
    assert missed.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="cannot fill in the middle"):
        client.generate(model=server.model, prompt="def f(", suffix="return 1")
    has_run("ollama", "errors")
