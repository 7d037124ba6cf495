"""The server over a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import json
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from kvboost import GenerationMode, KVBoost
from kvboost.serve.settings import ApiKey
from support.live_server import LiveServer, connect, events, live_server, wait_for
from support.remote_server import remote_server
from support.tiny import EOS, make_engine, tiny_model

KEYS = (ApiKey("ann", "k-ann"), ApiKey("bob", "k-bob"), ApiKey("root", "k-root", is_admin=True))
NO_END = {str(EOS): -100}
Serve = Callable[..., AbstractContextManager[LiveServer]]
here_or_remote = pytest.mark.parametrize("serve", [live_server, remote_server])


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama", max_position_embeddings=1024), max_waiting=40) as made:
        yield made
        assert made.check_integrity() == []


@pytest.fixture(scope="module")
def server(engine) -> Iterator[LiveServer]:
    with live_server(engine, keys=KEYS, served_names=("tiny",)) as started:
        yield started
        wait_for(lambda: engine.serving_stats()["kv_bytes"] == 0)


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with client_of(server, "k-ann") as made:
        yield made


def text(number: int, length: int = 150) -> str:
    """A text that shares nothing with that of another number."""
    return "".join(random.Random(number).choices(string.ascii_letters, k=length))


def client_of(server: LiveServer, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=120)


def complete(client: httpx.Client, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_an_answer_is_that_of_the_engine(client, engine) -> None:
    expected = engine.generate(text(1), 12, GenerationMode.BASELINE)
    said = complete(client, text(1))
    assert said["choices"][0]["text"] == expected.output_text
    assert said["choices"][0]["finish_reason"] == expected.finish_reason
    assert said["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert said["usage"]["completion_tokens"] == len(expected.token_ids)


def test_chat_uses_the_template(client, engine) -> None:
    messages = [{"role": "user", "content": text(2)}]
    expected = engine.chat(messages, 12, GenerationMode.BASELINE)
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
    said = client.post("/v1/chat/completions", json=body).json()
    assert said["choices"][0]["message"]["content"] == expected.output_text
    assert said["usage"]["prompt_tokens"] == expected.prompt_tokens


def test_rows_are_counted_by_source(client) -> None:
    complete(client, text(3))
    again = complete(client, f"{text(3)} Why?", kvboost={"explain": True})
    report = again["kvboost"]
    assert report["exact_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert report["exact_tokens"] >= 150 - 16
    assert report["exact_tokens"] + report["computed_tokens"] == again["usage"]["prompt_tokens"]
    assert "".join(span["text"] for span in report["spans"]) == f"{text(3)} Why?"
    assert all(span["tokens"] == span["end"] - span["start"] for span in report["spans"])
    assert 0 < report["ttft_ms"] <= report["total_ms"]


def test_cached_tokens_are_those_that_were_not_computed(client) -> None:
    complete(client, text(4, 200))
    again = {"strategy": "cacheblend", "ratio": 0.2}  # "auto" would ask first what is faster
    moved = complete(client, f"Something else comes here first. {text(4, 200)}", kvboost=again)
    report = moved["kvboost"]
    assert report["moved_tokens"] > 100 and report["recomputed_tokens"] > 0
    cached = report["moved_tokens"] - report["recomputed_tokens"]
    details = moved["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": cached, "exact_tokens": 0}
    exact = complete(client, f"Yet another beginning. {text(4)}", kvboost={"mode": "prefix_cache"})
    assert exact["kvboost"]["moved_tokens"] == 0 and exact["kvboost"]["mode"] == "prefix_cache"


def test_what_was_computed_on_moved_text_is_healed_after_the_answer(client, engine) -> None:
    """Without anybody asking for it: the loop does so when it is idle."""
    complete(client, text(40, 200))
    prompt = f"Something else comes here first. {text(40, 200)} And a question after it?"
    engine.heal()  # what other tests have left
    before = engine.cache_stats()["healing"]["healed"]
    moved = complete(
        client, prompt, logit_bias=NO_END, kvboost={"ratio": 0, "reuse_moved": "always"}
    )
    assert moved["kvboost"]["moved_tokens"] > 100
    assert moved["kvboost"]["answer_exact_from"] == moved["usage"]["completion_tokens"] == 12
    wait_for(lambda: engine.cache_stats()["healing"]["healed"] > before)
    again = complete(client, prompt, kvboost={"mode": "prefix_cache"})
    assert again["kvboost"]["exact_tokens"] == again["usage"]["prompt_tokens"] - 1
    shown = client.get("/metrics").text
    assert "kvboost_healing_healed_tokens_total" in shown and "kvboost_audit_mean_kl" in shown


def test_a_verified_answer_is_that_of_a_full_prefill(client) -> None:
    complete(client, text(41, 200))
    prompt = f"Something else comes here first. {text(41, 200)} And a question after it?"
    chosen = {"ratio": 0, "reuse_moved": "always", "exactness": "verified"}
    verified = complete(client, prompt, logit_bias=NO_END, kvboost=chosen)
    full = complete(client, prompt, logit_bias=NO_END, kvboost={"mode": "baseline"})
    report = verified["kvboost"]
    assert report["moved_tokens"] == 0 and report["answer_exact_from"] == 0
    assert report["notes"] == ["verified: only exact hits are reused"]
    assert verified["choices"][0]["text"] == full["choices"][0]["text"]


def test_tenants_do_not_share_cached_text(server, client) -> None:
    """The same text is a hit with the same key and none with another key."""
    said = text(5)
    assert complete(client, said)["kvboost"]["computed_tokens"] == 150
    assert complete(client, said)["kvboost"]["exact_tokens"] > 100
    with client_of(server, "k-bob") as other:
        assert complete(other, said)["kvboost"]["computed_tokens"] == 150
        assert complete(other, said)["kvboost"]["exact_tokens"] > 100
    assert complete(client, said, cache_salt="apart")["kvboost"]["computed_tokens"] == 150
    assert complete(client, said, cache_salt="apart")["kvboost"]["exact_tokens"] > 100


def test_an_administrator_can_warm_plan_and_forget(server, client) -> None:
    said = text(6)
    with client_of(server, "k-root") as admin:
        warmed = admin.post(
            "/kvboost/warm", json={"documents": [said], "header": "", "tenant": "ann"}
        )
        assert warmed.json()["new_chunks"] > 5
        planned = admin.post("/kvboost/plan", json={"prompt": said}).json()
        assert planned["computed_tokens"] == 150  # it is ann's, not root's
        assert complete(client, said)["kvboost"]["exact_tokens"] > 100
        listed = admin.get("/kvboost/cache", params={"limit": 500}).json()
        assert any(chunk["text"].startswith(said[:16]) for chunk in listed["chunks"])
        assert admin.post("/kvboost/forget", json={"text": said}).json()["forgotten"] > 5
        assert complete(client, said)["kvboost"]["exact_tokens"] == 0
        salt = {"cache_salt": "", "tenant": "ann"}
        assert admin.post("/kvboost/forget", json=salt).json()["forgotten"] > 5
        assert complete(client, said)["kvboost"]["exact_tokens"] == 0


def test_warming_a_document_does_not_hold_up_the_event_loop(engine, monkeypatch) -> None:
    """Tokenizing a long document takes seconds."""
    threads = []
    documents = engine._documents
    read = documents.read
    monkeypatch.setattr(
        documents, "read", lambda *some: threads.append(threading.current_thread()) or read(*some)
    )
    asyncio.run(engine.awarm(text(13)))
    assert threads and threads[0] is not threading.main_thread()


def test_the_pieces_of_a_stream_make_the_whole_answer(client) -> None:
    whole = complete(client, text(7), logprobs=2, max_tokens=40, logit_bias=NO_END)
    body = {"model": "tiny", "prompt": text(7), "temperature": 0, "max_tokens": 40, "stream": True}
    streamed = client.post("/v1/completions", json={**body, "logprobs": 2, "logit_bias": NO_END})
    chunks = [one["choices"][0] for one in events(streamed.text)]
    assert "".join(one["text"] for one in chunks) == whole["choices"][0]["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        told = [value for one in chunks for value in (one["logprobs"] or {}).get(name, ())]
        assert told == pytest.approx(whole["choices"][0]["logprobs"][name])


def test_seeds_are_repeatable_and_choices_differ(client) -> None:
    options = {"temperature": 1.5, "n": 3, "logit_bias": NO_END}
    first = [one["text"] for one in complete(client, text(8), seed=3, **options)["choices"]]
    again = [one["text"] for one in complete(client, text(8), seed=3, **options)["choices"]]
    assert first == again and len(set(first)) == 3
    alone = complete(client, text(8), seed=4, temperature=1.5, logit_bias=NO_END)
    assert alone["choices"][0]["text"] == first[1]


def test_token_ids_outside_the_vocabulary_are_refused(client) -> None:
    for wrong in ({"prompt": [5000]}, {"prompt": "a", "logit_bias": {"5000": 1}}):
        refused = client.post("/v1/completions", json={"model": "tiny", **wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in ("prompt", "logit_bias")


def test_concurrent_answers_are_those_of_single_requests(server, client) -> None:
    prompts = [text(100 + number, 60) for number in range(8)]
    alone = [complete(client, prompt)["choices"][0]["text"] for prompt in prompts]

    async def together() -> list[str]:
        headers = {"authorization": "Bearer k-ann"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as many:

            async def one(prompt: str) -> str:
                body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12}
                answer = await many.post("/v1/completions", json=body)
                text: str = answer.json()["choices"][0]["text"]
                return text

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(together()) == alone
    assert [choice["text"] for choice in complete(client, prompts)["choices"]] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_kv(server, client, engine, stream) -> None:
    body = {"model": "tiny", "prompt": text(12), "max_tokens": 900, "n": 4, "logit_bias": NO_END}
    leaving = client_of(server, "k-ann")
    leaving.timeout = httpx.Timeout(120.0 if stream else 0.3)
    try:
        with leaving.stream("POST", "/v1/completions", json={**body, "stream": stream}) as answer:
            next(answer.iter_bytes())
    except httpx.ReadTimeout:
        assert not stream
    leaving.close()

    def all_gone() -> bool:
        stats = engine.serving_stats()
        return bool(stats["running"] == stats["waiting"] == stats["kv_bytes"] == 0)

    wait_for(all_gone)
    assert engine.serving_stats()["finished"]["cancelled"] >= 4


def test_the_time_to_the_first_token_is_at_most_the_clients(server, client) -> None:
    """The server cannot know the time that the network takes."""
    body = {"model": "tiny", "prompt": text(11, 400), "max_tokens": 3, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        seen = (time.perf_counter() - began) * 1e3
        told = float(answer.headers["x-kvboost-ttft-ms"])
        answer.read()
    assert 0 < told <= seen


def test_metrics_count_all_prompt_rows(server, client, engine) -> None:
    def prompt_rows() -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("kvboost_prompt_tokens_total{")
        )

    before = prompt_rows()
    complete(client, text(10))
    complete(client, f"After this. {text(10)}")
    assert prompt_rows() - before == 312
    shown = client.get("/metrics").text
    for name in ("tier_bytes", "tier_hits_total", "batch_size_sum", "serving_running"):
        assert f"kvboost_{name}" in shown


@here_or_remote
def test_a_full_queue_says_when_to_try_again(serve: Serve) -> None:
    model = tiny_model("llama", max_position_embeddings=8192)
    with make_engine(model, max_running=1, max_waiting=1) as engine, serve(engine) as server:
        name = engine.model_name
        hold = {"model": name, "prompt": text(12), "max_tokens": 8000, "logit_bias": NO_END}
        body = json.dumps(hold).encode()
        with connect(server, body):
            wait_for(lambda: engine.serving_stats()["running"] == 1)
            with connect(server, body):
                wait_for(lambda: engine.serving_stats()["waiting"] == 1)
                with httpx.Client(base_url=server.url, timeout=120) as client:
                    refused = client.post("/v1/completions", json={**hold, "stream": True})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


@here_or_remote
def test_a_request_that_takes_too_long_is_cancelled(serve: Serve) -> None:
    model = tiny_model("llama", max_position_embeddings=8192)
    with make_engine(model) as engine, serve(engine, timeout=0.3) as server:
        body = {
            "model": engine.model_name,
            "prompt": text(12),
            "max_tokens": 8000,
            "logit_bias": NO_END,
        }
        with httpx.Client(base_url=server.url, timeout=120) as client:
            late = client.post("/v1/completions", json=body)
            assert late.status_code == 504 and "0.3 s" in late.json()["error"]["message"]
            streamed = client.post("/v1/completions", json={**body, "stream": True}).text
        assert '"code":"timeout"' in streamed and "[DONE]" not in streamed
        wait_for(lambda: engine.serving_stats()["kv_bytes"] == 0)
