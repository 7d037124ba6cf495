"""``kvboost route`` before two real servers of a tiny model, each a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from support.live_server import wait_for
from support.passages import text
from support.server_process import ServerProcess
from support.tiny import save_tiny

KEYS = {"KVBOOST_API_KEYS": "ann:k-ann,bob:k-bob", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that reads long prompts."""
    model = tmp_path / "tiny"
    save_tiny(model, max_position_embeddings=8192)
    return tmp_path


@pytest.fixture
def cluster(folder: Path) -> Iterator[tuple[ServerProcess, dict[str, ServerProcess]]]:
    """A router and its servers by address."""
    options = ("-m", str(folder / "tiny"), "--served-name", "tiny")

    def start(place: Path) -> ServerProcess:
        place.mkdir()
        return ServerProcess(*options, folder=place, **KEYS)

    with ExitStack() as stack, ThreadPoolExecutor(2) as together:
        servers = list(together.map(start, (folder / "one", folder / "other")))
        for server in servers:
            stack.enter_context(server)
        urls = [server.url for server in servers]
        router = stack.enter_context(
            ServerProcess(*urls, "--health-seconds", "0.2", folder=folder, command="route")
        )
        yield router, {server.root: server for server in servers}


def ask(router: ServerProcess, prompt: str, key: str = "k-ann", **more):
    """The answer, and the server that gave it."""
    with openai.OpenAI(base_url=router.url, api_key=key, max_retries=0) as client:
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt=prompt, temperature=0, **{"max_tokens": 4, **more}
        )
        return raw.parse(), raw.headers["x-kvboost-upstream"]


def test_two_servers_behave_as_one(cluster) -> None:
    router, servers = cluster

    # Documents are spread, and found again wherever they are in a prompt.
    documents = [text(number, 120) for number in range(4)]
    first = [ask(router, document)[1] for document in documents]
    assert {first.count(url) for url in servers} == {2}
    for number, document in enumerate(documents):
        answer, url = ask(router, f"{text(f'new {number}', 8)} {document} Why?")
        assert url == first[number]
        reused = answer.kvboost["moved_tokens"] + answer.kvboost["exact_tokens"]
        assert reused > 0.8 * len(document)

    # The servers check keys, and a tenant's text says nothing about another's.
    with pytest.raises(openai.AuthenticationError):
        ask(router, "Hello", key="wrong")
    answer, _ = ask(router, documents[0], key="k-bob")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0

    # A server is killed while it answers: that stream ends with an error, the next request is
    # answered by the other one.
    begun, outcome = threading.Event(), []

    def listen() -> None:
        with openai.OpenAI(base_url=router.url, api_key="k-ann", max_retries=0) as client:
            raw = client.completions.with_raw_response.create(
                model="tiny",
                prompt=documents[0],
                max_tokens=6000,
                stream=True,
                logit_bias={"256": -100},
            )
            outcome.append(raw.headers["x-kvboost-upstream"])
            try:
                for _ in raw.parse():
                    begun.set()
                outcome.append("ended")
            except (openai.APIError, httpx.TransportError) as error:
                outcome.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    assert begun.wait(60)
    servers[first[0]].kill()
    thread.join(60)
    url, error = outcome
    assert url == first[0] and isinstance(error, Exception)
    for document in documents:
        answer, url = ask(router, document)
        assert url != first[0] and answer.choices[0].finish_reason == "length"
    states = httpx.get(f"{router.root}/ready", trust_env=False).json()["upstreams"]
    assert sorted(states.values()) == ["down", "up"]

    # The last server drains: it finishes what it has, and new requests are told to come back.
    (last,) = (server for url, server in servers.items() if url != first[0])
    last.terminate()
    assert last.wait() == 0
    wait_for(lambda: httpx.get(f"{router.root}/ready", trust_env=False).status_code == 503)
    with pytest.raises(openai.InternalServerError, match="no upstream") as refused:
        ask(router, "Hello")
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1

    router.terminate()
    assert router.wait() == 0
    assert "Traceback" not in router.log and "stopped" in router.log
