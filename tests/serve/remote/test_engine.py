"""The server with its engine behind a connection, over a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvboost.serve
from kvboost import KVBoost
from kvboost.serve.errors import ApiError
from kvboost.serve.remote.engine import RemoteEngine
from kvboost.serve.remote.wire import EngineDescription
from kvboost.serve.settings import ApiKey
from support.adapters import write_adapter
from support.live_server import LiveServer, connect, wait_for
from support.remote_server import hosted, remote_server
from support.tiny import EOS, make_engine, tiny_encoder, tiny_model

NO_END = {str(EOS): -100}
PROMPT = "A lighthouse warns ships of rocks. " * 4


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama", max_position_embeddings=1024), max_waiting=40) as made:
        yield made
        assert made.check_integrity() == []


@pytest.fixture(scope="module")
def server(engine) -> Iterator[LiveServer]:
    with remote_server(engine, served_names=("tiny",)) as started:
        yield started


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as made:
        yield made


def ask(client: httpx.Client, path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "tiny", **more})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_the_engine_makes_no_text_of_its_answers(client, engine, monkeypatch) -> None:
    """Unless a stop string may end them."""
    decoded: list[Any] = []
    tokenizer = engine.prompt_tokenizer
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda *ids, **how: decoded.append(ids) or decode(*ids, **how)
    )
    options = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "logit_bias": NO_END}
    said = ask(client, **options)["choices"][0]["text"]
    assert decoded == []
    assert said == engine.generate(PROMPT, 20, logit_bias={EOS: -100}).output_text
    decoded.clear()
    stopped = ask(client, **options, stop=[said[5]])["choices"][0]
    assert (
        decoded
        and stopped["finish_reason"] == "stop"
        and stopped["text"] == said[: said.index(said[5])]
    )


def test_a_format_is_compiled_once_and_only_by_the_engine(client, engine, monkeypatch) -> None:
    compiled: list[str] = []
    compile_one = engine._grammars.compile
    monkeypatch.setattr(
        engine._grammars,
        "compile",
        lambda grammar, option="grammar": compiled.append(grammar) or compile_one(grammar, option),
    )
    body = {"prompt": "x", "guided_choice": ["left", "right"], "max_tokens": 9}
    assert ask(client, **body)["choices"][0]["text"] in ("left", "right")
    assert len(set(compiled)) == 1  # asked for when it is checked, and found when it is used
    assert len(engine._grammars._compiled) == 1


def test_embeddings_are_those_of_the_engine(client, engine) -> None:
    texts = ["a", "some words " * 30]
    found = ask(client, "/v1/embeddings", input=texts)["data"]
    for one, expected in zip(found, engine.embed(texts), strict=True):
        assert one["embedding"] == pytest.approx(expected.tolist())


def test_a_model_for_embeddings_stays_with_the_engine(engine) -> None:
    own = tiny_encoder()
    with remote_server(engine, embedding_model=own) as server:
        body = {"model": own.name, "input": ["a lighthouse"]}
        found = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120).json()
    expected = own.embed(["a lighthouse"])[0].tolist()
    assert found["data"][0]["embedding"] == pytest.approx(expected, abs=1e-6)


def test_adapters_can_be_loaded_and_named_at_once(client, engine, tmp_path) -> None:
    write_adapter(tmp_path / "poet", tiny_model("llama"))
    given = {"lora_name": "poet", "lora_path": str(tmp_path / "poet")}
    assert client.post("/v1/load_lora_adapter", json=given).status_code == 200
    body = {"prompt": PROMPT, "temperature": 0, "logit_bias": NO_END}
    plain, poet = (
        ask(client, **{**body, "model": name})["choices"][0]["text"] for name in ("tiny", "poet")
    )
    assert plain != poet
    missing = {"lora_name": "other", "lora_path": str(tmp_path / "nowhere")}
    assert client.post("/v1/load_lora_adapter", json=missing).status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
    assert client.post("/v1/completions", json={**body, "model": "poet"}).status_code == 404


def test_documents_pins_and_sessions_are_kept(client, engine) -> None:
    made = client.post("/kvboost/documents", json={"text": PROMPT}).json()
    wait_for(lambda: client.get(f"/kvboost/documents/{made['id']}").json()["status"] == "ready")
    messages = [{"role": "user", "content": PROMPT + "Why?"}]
    first = ask(
        client, "/v1/chat/completions", messages=messages, kvboost={"session": "s"}, max_tokens=2
    )
    assert first["kvboost"]["exact_tokens"] > 100
    assert client.get("/kvboost/sessions/s").json()["turns"] == 1
    stored = ask(client, "/v1/responses", input=PROMPT)  # its KV is pinned in the event loop
    assert len(engine.pins()) == 2
    assert client.delete(f"/v1/responses/{stored['id']}").status_code == 200
    assert client.delete("/kvboost/sessions/s").json()["deleted"]
    assert engine.pins() == []
    gone = client.post("/kvboost/forget", json={"text": PROMPT}).json()
    assert gone["forgotten"] > 5


def test_the_page_sees_how_approximate_rows_are_healed(client, engine) -> None:
    ask(client, prompt=PROMPT, max_tokens=1)
    ask(
        client,
        prompt=f"Before it. {PROMPT}",
        kvboost={"ratio": 0, "reuse_moved": "always"},
        logit_bias=NO_END,
    )

    def healed() -> bool:
        (one,) = client.get("/kvboost/live").json()["healed_requests"]
        return bool(one["status"] == "done" and one["healed_tokens"] == one["approximate_tokens"])

    wait_for(healed)


def test_without_an_engine_every_call_ends_with_an_error(engine) -> None:
    async def lost() -> None:
        with hosted(engine) as link:
            about = EngineDescription.of(engine, pickle.dumps(engine.prompt_tokenizer))
            remote = RemoteEngine(link, about)
            stopped = asyncio.Event()
            link.on_stop = stopped.set
            link.attach()
            stream = remote.astream([1, 2, 3], 900, "baseline", logit_bias={EOS: -100})
            async with stream:
                await anext(stream)
                statistics = asyncio.ensure_future(asyncio.to_thread(remote.cache_stats))
                await statistics
                link._pipe.shut()
                await stopped.wait()
                with pytest.raises(ApiError, match="has ended"):
                    async for _ in stream:
                        pass
            for call in (
                lambda: remote.pin_cached("a", [1]),
                lambda: remote.astream([1], 1, "baseline"),
            ):
                with pytest.raises(ApiError, match="has ended"):
                    call()
            with pytest.raises(ApiError, match="has ended"):
                await remote.awarm("text")

    asyncio.run(lost())
    wait_for(lambda: engine.serving_stats()["running"] == 0)


def test_a_remote_engine_has_all_that_the_server_uses_of_one(engine) -> None:
    folder = Path(kvboost.serve.__file__).parent
    used = {
        name
        for path in folder.rglob("*.py")
        if path.parent.name != "remote" and path.name != "process.py"
        for name in re.findall(r"engine\.([a-z_]+)", path.read_text())
    }
    assert {"astream", "encode", "pin_cached", "config"} <= used
    with hosted(engine) as link:
        about = EngineDescription.of(engine, pickle.dumps(engine.prompt_tokenizer))
        remote = RemoteEngine(link, about)
        assert [name for name in sorted(used) if not hasattr(remote, name)] == []


def test_tenants_take_turns_in_the_engine() -> None:
    keys = tuple(ApiKey(name, f"k-{name}") for name in ("ann", "bob"))
    model = tiny_model("llama", max_position_embeddings=8192)
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8000, "logit_bias": NO_END}
    with (
        make_engine(model, max_running=1, max_waiting=3) as engine,
        remote_server(engine, keys=keys, served_names=("tiny",)) as server,
        ExitStack() as open_ones,
    ):
        for number, key in enumerate(("k-ann", "k-ann", "k-ann", "k-bob"), start=1):
            if key == "k-bob":
                headers = {"authorization": "Bearer k-ann"}
                url = f"{server.url}/v1/completions"
                refused = httpx.post(url, json=body, headers=headers, timeout=120)
            open_ones.enter_context(connect(server, json.dumps(body).encode(), key=key))
            wait_for(lambda number=number: queued(engine) == number)
        assert refused.status_code == 429 and "reserved for other" in refused.text
        open_ones.close()
        wait_for(lambda: queued(engine) == 0)


def queued(engine: KVBoost) -> int:
    stats = engine.serving_stats()
    return int(stats["running"] + stats["waiting"])
