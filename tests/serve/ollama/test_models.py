"""Ollama's API over a tiny model: what it says of models, embeddings, and the times of answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.testclient import TestClient

from kvboost import KVBoost
from kvboost.serve.app import create_app
from kvboost.serve.ollama.replies import (
    EmbedReply,
    OllamaErrorReply,
    OllamaModels,
    RunningModels,
    ShowReply,
)
from kvboost.serve.settings import ServerSettings
from support.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    model = tiny_model("llama", max_position_embeddings=64)
    with KVBoost.from_model(model, byte_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(engine: KVBoost) -> Iterator[TestClient]:
    with TestClient(create_app(engine, ServerSettings(served_names=("tiny", "x:1b")))) as client:
        yield client


def test_models_are_listed_with_a_tag_and_are_loaded(tiny, engine) -> None:
    listed = OllamaModels.model_validate(tiny.get("/api/tags").json()).models
    assert [one.name for one in listed] == [one.model for one in listed] == ["tiny:latest", "x:1b"]
    facts = engine.facts()
    assert listed[0].size == 4 * facts["parameters"]
    assert listed[0].details["family"] == "llama"
    assert listed[0].details["quantization_level"] == "F32"
    assert re.fullmatch("[0-9a-f]{64}", listed[0].digest)
    loaded = RunningModels.model_validate(tiny.get("/api/ps").json()).models
    assert [one.name for one in loaded] == ["tiny:latest", "x:1b"]
    assert loaded[0].context_length == 64 and loaded[0].expires_at > loaded[0].modified_at


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "x:1b"])
def test_a_model_is_described(tiny, engine, name: str) -> None:
    said = ShowReply.model_validate(tiny.post("/api/show", json={"model": name}).json())
    assert said.capabilities == ["completion", "tools", "embedding"]
    assert said.model_info == {
        "general.architecture": "llama",
        "general.parameter_count": engine.facts()["parameters"],
        "llama.context_length": 64,
    }


def test_what_a_model_can_do(client, fake, serve_fake) -> None:
    fake.thinks = fake.fills_in = True
    said = client.post("/api/show", json={"model": "fake"}).json()
    assert said["capabilities"] == ["completion", "tools", "insert", "thinking", "embedding"]
    encoder = SimpleNamespace(name="bert", max_tokens=7, vocab_size=260)
    client = serve_fake(embedding_model=encoder)
    assert client.post("/api/show", json={"model": "bert"}).json()["capabilities"] == ["embedding"]
    said = client.post("/api/show", json={"model": "fake"}).json()
    assert "embedding" not in said["capabilities"]
    listed = client.get("/api/tags").json()["models"]
    assert [one["name"] for one in listed] == ["fake:latest", "bert:latest"]
    loaded = client.get("/api/ps").json()["models"]
    assert [one["context_length"] for one in loaded] == [100, 7]


def test_a_model_that_is_not_there(tiny) -> None:
    missed = tiny.post("/api/show", json={"model": "other"})
    assert missed.status_code == 404
    assert "there is tiny, x:1b" in OllamaErrorReply.model_validate(missed.json()).error


def test_the_version_is_one_that_ollamas_clients_can_compare(tiny) -> None:
    version = tiny.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # VS Code wants this one at least


def test_clients_see_that_there_is_a_server(tiny) -> None:
    answer = tiny.head("/")
    assert answer.status_code == 200 and answer.content == b""


def test_the_durations_of_an_answer_add_up(tiny) -> None:
    given = {"model": "tiny", "prompt": "a", "raw": True, "options": {"num_predict": 3}}
    said = tiny.post("/api/generate", json={**given, "stream": False}).json()
    parts = [said[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(said["total_duration"], abs=3)
    assert (said["prompt_eval_count"], said["eval_count"]) == (1, 3)


def test_embeddings(tiny, engine) -> None:
    given = {"model": "tiny:latest", "input": ["a lamp", "a ship"]}
    said = EmbedReply.model_validate(tiny.post("/api/embed", json=given).json())
    np.testing.assert_allclose(said.embeddings, engine.embed(["a lamp", "a ship"]), atol=1e-6)
    assert said.prompt_eval_count == 12 and said.total_duration > 0
    one = tiny.post("/api/embed", json={**given, "input": "a lamp"}).json()
    np.testing.assert_allclose(one["embeddings"], said.embeddings[:1], atol=1e-6)
    older = tiny.post("/api/embeddings", json={"model": "tiny", "prompt": "a lamp"}).json()
    assert older == {"embedding": one["embeddings"][0]}
    for nothing in ("", []):
        empty = tiny.post("/api/embed", json={**given, "input": nothing}).json()
        assert empty["embeddings"] == [] and empty["prompt_eval_count"] == 0


def test_long_inputs_are_cut_unless_the_request_forbids_it(tiny) -> None:
    given = {"model": "tiny", "input": "x" * 500}
    assert tiny.post("/api/embed", json=given).json()["prompt_eval_count"] == 64
    refused = tiny.post("/api/embed", json={**given, "truncate": False})
    assert refused.status_code == 400 and "truncate to true" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/api/embed", {"input": "x", "dimensions": 3}, 400),
        ("/api/embed", {"input": ["x", ""]}, 400),
        ("/api/embeddings", {"prompt": ""}, 400),
        ("/api/embed", {"input": "x", "model": "other"}, 404),
    ],
)
def test_embeddings_that_cannot_be_made(tiny, path: str, more, status: int) -> None:
    refused = tiny.post(path, json={"model": "tiny", **more})
    assert refused.status_code == status
    OllamaErrorReply.model_validate(refused.json())
