"""Embeddings and rankings over HTTP, by the loaded model and by one of their own."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from kvboost import KVBoost
from kvboost.runtime.scheduler import Patience
from kvboost.serve.app import create_app
from kvboost.serve.embedder import Embedder
from kvboost.serve.settings import ServerSettings
from support.tiny import EOS, VOCAB, byte_tokenizer, make_engine, tiny_encoder, tiny_model

TEXTS = ["the tower has a lamp", "a", "ships pass the sound at night " * 12]


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    model = tiny_model("llama", max_position_embeddings=512)
    with KVBoost.from_model(model, byte_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: KVBoost) -> Iterator[TestClient]:
    with TestClient(create_app(engine, ServerSettings(served_names=("tiny",)))) as client:
        yield client


def embed(client: TestClient, given: Any, model: str = "tiny", **more: Any) -> Any:
    return client.post("/v1/embeddings", json={"model": model, "input": given, **more})


def test_the_loaded_model_gives_the_mean_of_its_last_hidden_states(client, engine) -> None:
    answer = embed(client, TEXTS).json()
    found = np.array([one["embedding"] for one in answer["data"]])
    stock = tiny_model("llama", max_position_embeddings=512)
    for row, text in zip(found, TEXTS, strict=True):
        ids = torch.tensor([engine.encode(text)])
        with torch.inference_mode():
            hidden = stock.model(ids).last_hidden_state[0].mean(0)
        expected = (hidden / hidden.norm()).numpy()
        np.testing.assert_allclose(row, expected, atol=2e-5)
    np.testing.assert_allclose(engine.embed(TEXTS), found, atol=1e-6)
    tokens = sum(len(engine.encode(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert engine.cache_stats()["chunks"] == 0 and engine.check_integrity() == []


def test_every_form_of_input_and_output(client, engine) -> None:
    (one,) = embed(client, "a lamp").json()["data"]
    ids = engine.encode("a lamp")
    for same in (["a lamp"], ids, [ids]):
        assert embed(client, same).json()["data"][0]["embedding"] == one["embedding"]
    text = embed(client, "a lamp", encoding_format="base64").json()["data"][0]["embedding"]
    decoded = np.frombuffer(base64.b64decode(text), "<f4")
    np.testing.assert_allclose(decoded, one["embedding"], atol=1e-7)
    assert embed(client, "a lamp", dimensions=len(decoded)).is_success


def test_mistakes_are_named(client) -> None:
    for given, more, param in (
        ("a", {"dimensions": 8}, "dimensions"),
        ("", {}, "input"),
        ([], {}, "input"),
        ("x" * 600, {}, "input"),
        ("a", {"encoding_format": "int8"}, "encoding_format"),
        ([VOCAB], {}, "input"),
    ):
        refused = embed(client, given, **more)
        assert refused.status_code == 400, given
        assert refused.json()["error"]["param"].startswith(param)
    assert embed(client, "a", model="other").status_code == 404
    assert (
        embed(client, "x" * 600, truncate_prompt_tokens=-1).json()["usage"]["total_tokens"] == 512
    )


def test_an_answer_is_not_held_up_by_embeddings(engine) -> None:
    """Slices of embeddings and steps of answers take turns in one thread."""
    steps, seen = engine.embedder.steps([engine.encode("y" * 500)] * 4), []
    queued = threading.Event()

    def compute_slice() -> None:
        seen.append(engine.serving_stats()["steps"])
        next(steps)

    async def answer() -> int:
        engine.between_steps(queued.wait)  # until all the others are queued
        async with engine.astream("a prompt", 16, logit_bias={EOS: -100}) as stream:
            slices = [engine.between_steps(compute_slice) for _ in range(6)]
            queued.set()
            async for _ in stream:
                pass
        assert all(done.result() is None for done in slices)
        return stream.num_tokens

    assert asyncio.run(answer()) == 16
    assert seen == list(range(seen[0], seen[0] + 6))
    steps.close()


def test_an_answer_goes_on_between_the_layers_of_another_model(monkeypatch) -> None:
    encoder = tiny_encoder()
    monkeypatch.setattr(Patience, "is_over", lambda self: True)
    with make_engine(tiny_model("llama")) as engine:
        Embedder(engine, encoder)

        async def answer() -> int:
            async with engine.astream("a prompt", 16, logit_bias={EOS: -100}) as stream:
                await anext(stream)
                await asyncio.wrap_future(engine.between_steps(lambda: encoder.embed(["a"] * 3)))
                async for _ in stream:
                    pass
            return stream.num_tokens

        assert asyncio.run(answer()) == 16
        assert engine.serving_stats()["steps_between_parts"] > 0


def test_a_model_of_its_own_embeds_with_padding_left_out(engine) -> None:
    encoder = tiny_encoder()
    settings = ServerSettings(served_names=("tiny",), embedding_model=encoder)
    client = TestClient(create_app(engine, settings))
    names = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert names == ["tiny", "tiny-bert"]
    assert client.get("/v1/models/tiny-bert").json()["context_length"] == 64
    answer = embed(client, ["a", "a longer text than the other"], "tiny-bert")
    both = [one["embedding"] for one in answer.json()["data"]]
    (alone,) = embed(client, "a", "tiny-bert").json()["data"]
    np.testing.assert_allclose(both[0], alone["embedding"], atol=1e-6)
    np.testing.assert_allclose(encoder.embed(["a"])[0], both[0], atol=1e-6)
    assert embed(client, "x" * 65, "tiny-bert").status_code == 400
    assert embed(client, "a", "tiny").status_code == 404
    asked = {"model": "tiny-bert", "query": "the lamp", "documents": [*TEXTS[:2], "the lamp"]}
    ranked = client.post("/v1/rerank", json={**asked, "return_documents": True}).json()
    best = ranked["results"][0]
    assert best["index"] == 2 and best["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    assert best["document"] == {"text": "the lamp"} and len(ranked["results"]) == 3
    assert len(client.post("/v1/rerank", json={**asked, "top_n": 1}).json()["results"]) == 1
