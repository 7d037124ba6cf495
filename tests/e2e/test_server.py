"""The real server and OpenAI's own client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from kvboost import KVBoost
from support.live_server import wait_for
from support.server_process import ServerProcess
from support.tiny import save_tiny

MODEL = "tiny"
DOCUMENT = (
    "The lighthouse at Skagen was lit in 1858. Its lamp burned paraffin until the cable came. "
    "The keeper wrote the weather down every four hours, and the ships that passed. "
) * 4


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys.txt"
    keys.write_text("ann:k-ann\nbob:k-bob\nadmin:root:k-root\n")
    save_tiny(folder / MODEL, max_position_embeddings=8192)
    options = ("-m", str(folder / MODEL), "--served-name", MODEL, "--served-name", "gpt-small")
    with ServerProcess(*options, "--api-keys", str(keys), folder=folder) as started:
        yield started


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="k-ann", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options):
    return client.chat.completions.create(
        model=MODEL, messages=question(text), temperature=0, max_tokens=8, **options
    )


def test_chat_streamed_or_not_says_the_same(client) -> None:
    whole = ask(client, "When was it lit?")
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(ask(client, "When was it lit?", stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == choice.message.content


def test_what_was_read_before_is_not_read_again_and_usage_says_so(client) -> None:
    ask(client, "Who wrote the weather down?")
    again = ask(client, "What did the lamp burn?")
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached > 80 and again.kvboost["exact_tokens"] == cached
    spans = again.kvboost["spans"]
    assert spans[0]["kind"] == "exact" and spans[-1]["end"] == again.usage.prompt_tokens
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=question("Why?"), max_tokens=1
    )
    assert int(raw.headers["x-kvboost-exact-tokens"]) > 80
    assert raw.headers["x-request-id"].startswith("req-")


def test_mistakes_raise_the_clients_own_errors(server, client) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.chat.completions.create(model="gpt-7", messages=question("?"))
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "?", n=9)
    assert caught.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="context holds") as long:
        client.completions.create(model=MODEL, prompt="word " * 20_000)
    assert long.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model=MODEL, prompt="x")


def test_terminating_under_load_finishes_answers_and_keeps_the_cache(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", max_position_embeddings=8192)
    options = ("-m", str(tmp_path / "tiny"), "--cache-dir", str(tmp_path / "kv"))
    answers: list[str] = []
    begun = threading.Barrier(5)

    def talk(url: str, number: int) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny",
                prompt=f"{DOCUMENT} {number}",
                max_tokens=200,
                logit_bias={"256": -100},
                stream=True,
            )
            begun.wait(300)
            *_, last = stream
            answers.append(last.choices[0].finish_reason)

    with ServerProcess(*options, folder=tmp_path, OMP_NUM_THREADS="1") as server:
        threads = [threading.Thread(target=talk, args=(server.url, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(300)
        assert not answers
        server.terminate()
        for thread in threads:
            thread.join(300)
        assert server.wait() == 0
        assert answers == ["length"] * 4
        assert "for 4 running requests; Ctrl-C ends them" in server.log
        assert "Traceback" not in server.log

    with KVBoost.from_pretrained(tmp_path / "tiny", disk_cache_dir=tmp_path / "kv") as engine:
        again = engine.generate(f"{DOCUMENT} 5", 1)
        assert again.cached_tokens >= len(DOCUMENT) - 32 and again.spans[0].tier == "disk"


def test_ctrl_c_while_it_stops_ends_answers_at_once(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", max_position_embeddings=8192)
    options = ("-m", str(tmp_path / "tiny"), "--drain-seconds", "300")
    with ServerProcess(*options, folder=tmp_path, OMP_NUM_THREADS="1") as server:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny",
                prompt=DOCUMENT,
                max_tokens=7000,
                logit_bias={"256": -100},
                stream=True,
            )
            next(iter(stream))
            server.interrupt()
            wait_for(lambda: "for 1 running requests" in server.log)
            server.interrupt()
            with suppress(openai.APIError, httpx.HTTPError):
                assert all(one.choices[0].finish_reason != "length" for one in stream)
        assert server.wait() == 0
        assert "Traceback" not in server.log
