"""``kvboost serve --api-workers 1``: two real processes, what they answer, and how they end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost import KVBoost, KVBoostError
from kvboost.serve import process
from kvboost.serve.remote import processes
from kvboost.serve.settings import ServerSettings
from support.live_server import LiveServer, live_server, wait_for
from support.server_process import ServerProcess
from support.tiny import EOS, make_engine, save_tiny, tiny_model

NO_END = {str(EOS): -100}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is a lighthouse for? " * 4}],
    "temperature": 0,
    "max_tokens": 24,
}
ECHO = {"model": "tiny", "prompt": "abc", "temperature": 0, "echo": True, "logprobs": 2}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
PATH = "/v1/chat/completions"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (PATH, CHAT),
    "stream": (PATH, {**CHAT, "stream": True, "logit_bias": NO_END}),
    "stop": (PATH, {**CHAT, "logit_bias": NO_END, "stop": ["e", "\u00e9"]}),
    "logprobs": (PATH, {**CHAT, "logprobs": True, "top_logprobs": 3, "stream": True}),
    "tools": (PATH, {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    "schema": (PATH, {**CHAT, "response_format": FORMAT}),
    "echo": ("/v1/completions", ECHO),
    "echo in a stream": ("/v1/completions", {**ECHO, "stream": True, "logit_bias": NO_END}),
    "several": (
        "/v1/completions",
        {"model": "tiny", "prompt": ["abc", "def"], "n": 2, "seed": 3, "temperature": 1.5},
    ),
    "embeddings": ("/v1/embeddings", {"model": "tiny", "input": ["a", "bc"]}),
    "messages": ("/v1/messages", {**CHAT, "stream": True}),
    "too long": ("/v1/completions", {"model": "tiny", "prompt": "x" * 9000}),
    "unknown option": ("/v1/completions", {"model": "tiny", "prompt": "x", "min_tokens": 10**6}),
    "impossible format": (
        "/v1/completions",
        {"model": "tiny", "prompt": "x", "guided_grammar": "start: nothing"},
    ),
    "tokens": ("/tokenize", {"model": "tiny", "prompt": "abc", "return_token_strs": True}),
}
CHANGING = ("id", "created", "kvboost", "prompt_tokens_details", "request_id")
"""What differs from one answer to the next."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("apart") / "tiny", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def keys(model) -> Path:
    file = model.parent / "keys.txt"
    file.write_text("admin:ann:k-ann\n")
    return file


@pytest.fixture(scope="module")
def servers(model, keys) -> Iterator[Callable[[], ServerProcess]]:
    """Gives the server that runs, or starts one: with HTTP in a process of its own."""
    options = ("-m", str(model), "--api-workers", "1", "--speculate", "off")
    running: list[ServerProcess] = []
    with ExitStack() as stack:

        def get() -> ServerProcess:
            if not running or not is_alive(running[-1].pid):
                made = ServerProcess(
                    *(*options, "--api-keys", str(keys)), folder=model.parent, OMP_NUM_THREADS="1"
                )
                running.append(stack.enter_context(made))
            return running[-1]

        yield get


@pytest.fixture
def server(servers) -> ServerProcess:
    started: ServerProcess = servers()
    return started


@pytest.fixture(scope="module")
def whole(model) -> Iterator[LiveServer]:
    """The same model, with all in one process."""
    with (
        KVBoost.from_pretrained(model, device="cpu", speculate="off") as engine,
        live_server(engine, served_names=("tiny",)) as started,
    ):
        yield started


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer k-ann"}
    with httpx.Client(base_url=server.root, headers=headers, timeout=120) as made:
        yield made


def api_process(server: ServerProcess) -> int:
    """The id of its process for HTTP."""
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return int(child)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def steady(value: Any) -> Any:
    """``value`` without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {name: steady(one) for name, one in value.items() if name not in CHANGING}
    return [steady(one) for one in value] if isinstance(value, list) else value


def said(answer: httpx.Response) -> Any:
    """What an answer says, however it is cut into events."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return steady(answer.json())
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [steady(json.loads(one)) for one in data]


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_one_process(server, client, whole, name) -> None:
    path, body = REQUESTS[name]
    apart = client.post(path, json=body)
    together = httpx.post(f"{whole.url}{path}", json=body, timeout=120)
    assert apart.status_code == together.status_code
    assert said(apart) == said(together)


def metrics(client: httpx.Client) -> str:
    return client.get("/metrics").text


def test_the_page_metrics_and_lists_are_there(client) -> None:
    client.post("/v1/chat/completions", json=CHAT)
    live = client.get("/kvboost/live").json()
    assert live["requests"][-1]["completion_tokens"] <= 24
    assert live["requests"][-1]["estimated_ms"] is None or live["requests"][-1]["estimated_ms"] > 0
    assert live["facts"]["architecture"] == "LlamaForCausalLM"
    assert client.get("/kvboost/cache").json()["stats"]["tiers"]["ram"]["chunks"] > 0
    shown = metrics(client)
    for name in ("answers_total", "ttft_seconds_count", "tier_bytes", "serving_running", "steps"):
        assert f"kvboost_{name}" in shown
    assert client.get("/").status_code == 200 and client.get("/openapi.json").status_code == 200


def test_a_closed_connection_cancels_its_answer(client) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8000, "logit_bias": NO_END}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        assert client.get("/kvboost/live").json()["queue"]["running"] == 1
    wait_for(lambda: client.get("/kvboost/live").json()["queue"]["running"] == 0)
    # Counted when the process that answered has read the end of the answer, a moment later.
    ended = 'answers_total{finish_reason="cancelled"} 0'
    wait_for(lambda: ended not in metrics(client))
    assert 'answers_total{finish_reason="cancelled"}' in metrics(client)


def test_sighup_changes_the_settings_of_the_other_process(server, client, keys) -> None:
    keys.write_text("admin:ann:k-ann\nbob:k-bob\n")
    os.kill(server.pid, signal.SIGHUP)
    bob = {"authorization": "Bearer k-bob"}
    wait_for(lambda: client.get("/v1/models", headers=bob).status_code == 200)
    assert "reload: changed keys" in server.log
    assert client.post("/v1/chat/completions", json=CHAT, headers=bob).status_code == 200
    keys.write_text("")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: "nothing was changed: --api-keys" in server.log)
    assert client.post("/v1/chat/completions", json=CHAT, headers=bob).status_code == 200


def test_a_new_api_process_finds_the_cache_and_the_settings(server, client, keys) -> None:
    """Clients wait for it: their connections are accepted all the time."""
    keys.write_text("admin:ann:k-ann\ncat:k-cat\n")
    os.kill(server.pid, signal.SIGHUP)
    cat = {"authorization": "Bearer k-cat"}
    wait_for(lambda: client.get("/v1/models", headers=cat).status_code == 200)
    prompt = "Of what the first process has read, the second one need not read anything. " * 4
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    client.post("/v1/completions", json=body)
    pinned = client.post("/kvboost/pins", json={"token_ids": [1, 2, 3, 4] * 40}).json()
    first = api_process(server)
    endless = {"model": "tiny", "prompt": "abc", "max_tokens": 8000, "logit_bias": NO_END}
    with client.stream("POST", "/v1/completions", json={**endless, "stream": True}) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        os.kill(first, signal.SIGKILL)
        keys.write_text("admin:ann:k-ann\ncat:k-cat\ndog:k-dog\n")
        os.kill(server.pid, signal.SIGHUP)  # while there is nobody to take it over
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            list(pieces)
    with httpx.Client(base_url=server.root, timeout=120) as later:
        assert later.post("/v1/chat/completions", json=CHAT, headers=cat).status_code == 200
        dog = {"authorization": "Bearer k-dog"}
        wait_for(lambda: later.get("/v1/models", headers=dog).status_code == 200)
        ann = {"authorization": "Bearer k-ann"}
        again = later.post("/v1/completions", json=body, headers=ann).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        pins = later.get("/kvboost/pins", headers=ann).json()["data"]
        assert [one["name"] for one in pins] == [pinned["name"]]
        assert later.get("/kvboost/live", headers=ann).json()["queue"]["running"] == 0
    assert api_process(server) != first
    assert "the API process has ended (signal 9)" in server.log


def test_answers_finish_before_the_server_stops(server, client) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 100, "logit_bias": NO_END}
    other = api_process(server)
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        pieces = answer.iter_text()
        said = next(pieces)  # all of it, if this process was slow
        server.terminate()
        said += "".join(pieces)
    assert '"finish_reason":"length"' in said and said.endswith("data: [DONE]\n\n")
    assert server.wait() == 0
    assert not is_alive(other)
    with pytest.raises(httpx.ConnectError):
        client.get("/health")
    assert "Traceback" not in server.log


def test_the_end_of_the_engine_is_a_clear_error(model, tmp_path) -> None:
    """Both a stream that runs and a request that waits get one, and no process is left."""
    options = ("-m", str(model), "--api-workers", "1", "--max-running", "1")
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8000, "logit_bias": NO_END}
    waited: list[httpx.Response] = []
    with ServerProcess(*options, folder=tmp_path, OMP_NUM_THREADS="1") as server:
        other = api_process(server)
        with (
            httpx.Client(base_url=server.root, timeout=120) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
        ):
            pieces = answer.iter_text()
            seen = next(pieces)
            waiting = threading.Thread(
                target=lambda: waited.append(
                    httpx.post(f"{server.root}/v1/completions", json=body, timeout=120)
                )
            )
            waiting.start()
            wait_for(lambda: client.get("/kvboost/live").json()["queue"]["waiting"] == 1)
            server.kill()
            seen += "".join(pieces)
            waiting.join(120)
        wait_for(lambda: not is_alive(other))
    last = json.loads(seen.removesuffix("\n\n").rpartition("data: ")[2])
    assert last["error"]["code"] == "engine_lost" and "started again" in last["error"]["message"]
    assert waited[0].status_code == 503 and waited[0].json() == last


def test_a_process_that_does_not_start_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(processes, "PROGRAM", "import sys; sys.exit(3)")
    interval = sys.getswitchinterval()
    with (
        make_engine(tiny_model("llama")) as engine,
        process.bind("127.0.0.1", 0) as listening,
        pytest.raises(KVBoostError, match=r"before it was ready \(exit code 3\)"),
    ):
        processes.serve(engine, ServerSettings(), listening)
    sys.setswitchinterval(interval)
