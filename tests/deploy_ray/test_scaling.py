"""Replicas of the real application come when requests wait, and go when all are idle."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from ray import serve

from support.live_server import wait_for

CLIENTS = 20
"""More than one engine runs at once (16)."""
PATIENCE = 600.0
"""Seconds. Busy machines take minutes to start a replica."""


def running() -> int:
    """How many replicas answer."""
    found = serve.status().applications["scaling"].deployments["Replica"].replica_states
    return sum(
        number
        for state, number in found.items()
        if str(getattr(state, "value", state)) == "RUNNING"
    )


@pytest.fixture
def url(serve_url: str) -> Iterator[str]:
    from kvboost.deploy import app

    given = {"dtype": "float32", "max_replicas": 2, "max_cache_bytes": "256MiB"}
    given |= {"upscale_seconds": 1, "downscale_seconds": 1, "drain_seconds": 5}
    serve.run(app(given), name="scaling", route_prefix="/")
    yield serve_url
    serve.delete("scaling")


def test_a_replica_is_added_while_requests_wait_and_removed_when_they_are_gone(url: str) -> None:
    assert running() == 1
    stop, replicas, failures = threading.Event(), set(), []

    def talk(number: int) -> None:
        """One long answer after the other."""
        asked = {"model": "smollm2-135m", "prompt": f"Number {number}.", "max_tokens": 400}
        while not stop.is_set():
            with httpx.stream(
                "POST",
                f"{url}/v1/completions",
                json={**asked, "stream": True, "logit_bias": {"0": -100}},
                headers={"authorization": "Bearer k-ann"},
                timeout=300,
            ) as answer:
                if answer.status_code != 200:
                    failures.append(answer.read())
                    return
                replicas.add(answer.headers["x-kvboost-upstream"])
                for _ in answer.iter_lines():
                    if stop.is_set():
                        break

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: running() == 2, PATIENCE)
        wait_for(lambda: len(replicas) == 2, PATIENCE)
    finally:
        stop.set()
    for thread in threads:
        thread.join(300)
    wait_for(lambda: running() == 1, PATIENCE)
    assert not failures
