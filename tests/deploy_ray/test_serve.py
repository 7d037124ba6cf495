"""``serve run kvboost.deploy:app`` with two replicas of the embedded model and a real Redis.

The tests run in this order: the first starts the application, later ones kill and replace replicas.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from importlib import import_module

import httpx
import pytest
import ray
from ray import serve

from support.live_server import wait_for

QUERY = {"strategy": "query"}
EXACT = {"mode": "prefix_cache"}
CLIENT = httpx.Client(timeout=300, trust_env=False)
"""Keeps its connections, as OpenAI's client does."""
SUBJECTS = ("bisect", "shlex", "textwrap", "sched")


def document(number: int) -> str:
    """Some 250 tokens of source code."""
    name = SUBJECTS[number]
    with open(import_module(name).__file__) as source:
        return f"# {name}\n{source.read()[200:1100]}"


def deploy(redis_url: str, **changes: object) -> None:
    given = {"dtype": "float32", "replicas": 2, "redis": redis_url, "max_cache_bytes": "512MiB"}
    from kvboost.deploy import app

    serve.run(app({**given, **changes}), name="kvboost", route_prefix="/")


@pytest.fixture(scope="module")
def url(serve_url: str, redis_url: str) -> Iterator[str]:
    deploy(redis_url)
    yield serve_url


def body(prompt: str, tokens: int = 4, **more: object) -> dict[str, object]:
    asked = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return {**asked, "kvboost": QUERY, **more}


def ask(url: str, prompt: str, key: str = "k-ann", **more) -> httpx.Response:
    return CLIENT.post(
        f"{url}/v1/completions",
        json=body(prompt, **more),
        headers={"authorization": f"Bearer {key}"},
    )


def states() -> dict[str, int]:
    """How many replicas are in which state."""
    found = serve.status().applications["kvboost"].deployments["Replica"].replica_states
    return {str(getattr(state, "value", state)): number for state, number in found.items()}


def test_documents_are_spread_and_found_again_wherever_they_are(url) -> None:
    first = [ask(url, document(number)) for number in range(4)]
    assert [answer.status_code for answer in first] == [200] * 4
    replicas = [answer.headers["x-kvboost-upstream"] for answer in first]
    assert sorted(map(replicas.count, set(replicas))) == [2, 2]
    for number in (2, 0, 3, 1):
        again = ask(url, f"Another beginning, number {number}.\n{document(number)}\nWhy?")
        assert again.headers["x-kvboost-upstream"] == replicas[number]
        assert again.json()["kvboost"]["moved_tokens"] > 150
    assert ask(url, "Hello", key="wrong").status_code == 401
    other = ask(url, document(0), key="k-bob").json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_answers_stream_and_other_paths_work(url) -> None:
    whole = ask(url, document(0), kvboost=EXACT).json()["choices"][0]["text"]
    with CLIENT.stream(
        "POST",
        f"{url}/v1/completions",
        json=body(document(0), kvboost=EXACT, stream=True),
        headers={"authorization": "Bearer k-ann"},
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]" and len(lines) > 2
    events = [json.loads(line) for line in lines]
    assert "".join(one["choices"][0]["text"] for one in events if one["choices"]) == whole
    assert CLIENT.get(f"{url}/health").json() == {"status": "ok"}
    assert ask(url, "x", temperature=-1).status_code == 400


def test_answers_do_not_wait_for_acknowledgements(url) -> None:
    """Ray's proxy does not name TCP on its socket, so asyncio would not set TCP_NODELAY on its
    connections. uvloop does, which Ray uses unless it is told not to."""

    def undelayed(_: object, port: int) -> list[bool]:
        """Of the connections to ``port``, in the process that has them."""
        found = []
        for number in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(number))) as one:
                    one.getpeername()
                    if one.family == socket.AF_INET and one.getsockname()[1] == port:
                        found.append(bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            except OSError:
                continue
        return found

    (name,) = (
        one["name"]
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["name"].startswith("SERVE_PROXY_ACTOR")
    )
    proxy = ray.get_actor(name, "serve")
    assert CLIENT.get(f"{url}/health").status_code == 200
    seen = ray.get(proxy.__ray_call__.remote(undelayed, httpx.URL(url).port))
    assert seen and all(seen)


def listen(url: str, prompt: str, tokens: int, begun: threading.Event, outcomes: list) -> None:
    """Notes the replica and the text of a stream, or the error that ended it."""
    seen = {"text": "", "end": "cut off", "replica": None}
    outcomes.append(seen)
    try:
        with CLIENT.stream(
            "POST",
            f"{url}/v1/completions",
            json=body(prompt, tokens, kvboost=EXACT, stream=True, logit_bias={"0": -100}),
            headers={"authorization": "Bearer k-ann"},
        ) as answer:
            seen["replica"] = answer.headers.get("x-kvboost-upstream")
            if answer.status_code != 200:
                seen["end"] = answer.status_code
                return
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    seen["end"] = "done"
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        seen["end"] = event["error"]["code"]
                        return
                    seen["text"] += event["choices"][0]["text"] if event["choices"] else ""
                    begun.set()
    except httpx.TransportError as error:
        seen["end"] = type(error).__name__


def start(
    url: str, prompt: str, tokens: int, outcomes: list
) -> tuple[threading.Thread, threading.Event]:
    begun = threading.Event()
    thread = threading.Thread(target=listen, args=(url, prompt, tokens, begun, outcomes))
    thread.start()
    return thread, begun


def test_a_replica_killed_in_mid_stream_breaks_no_other_request(url) -> None:
    right = {
        number: ask(
            url, document(number), max_tokens=200, kvboost=EXACT, logit_bias={"0": -100}
        ).json()["choices"][0]["text"]
        for number in range(2)
    }
    outcomes: list[dict] = []
    threads = []
    for number in range(2):
        thread, begun = start(url, document(number), 200, outcomes)
        assert begun.wait(120)
        threads.append(thread)
    victim = outcomes[0]["replica"]
    actor = f"SERVE_REPLICA::kvboost#Replica#{victim}"
    ray.kill(ray.get_actor(actor, namespace="serve"), no_restart=True)
    after = ask(url, document(1), max_tokens=4)
    for thread in threads:
        thread.join(300)
    assert after.status_code == 200 and after.headers["x-kvboost-upstream"] != victim
    assert outcomes[0]["end"] in ("upstream_lost", "RemoteProtocolError", "ReadError")
    for number, seen in enumerate(outcomes):
        assert seen["end"] != "done" or seen["text"] == right[number]
        assert right[number].startswith(seen["text"])
    wait_for(lambda: states().get("RUNNING") == 2, 180)  # Serve starts another one


def test_a_replica_that_is_stopped_finishes_its_answers(url, redis_url) -> None:
    outcomes: list[dict] = []
    threads = [start(url, document(number), 150, outcomes) for number in range(2)]
    for _, begun in threads:
        assert begun.wait(120)
    deploy(redis_url, replicas=1)
    for thread, _ in threads:
        thread.join(300)
    assert [seen["end"] for seen in outcomes] == ["done", "done"]
    wait_for(lambda: states() == {"RUNNING": 1}, 180)


def test_new_replicas_find_in_redis_what_others_have_read(url, redis_url) -> None:
    serve.delete("kvboost")
    deploy(redis_url, replicas=1)
    answer = ask(url, document(0), kvboost=EXACT)
    report = answer.json()["kvboost"]
    assert report["exact_tokens"] > 100
    assert {span["tier"] for span in report["spans"] if span["kind"] == "exact"} == {"remote"}
