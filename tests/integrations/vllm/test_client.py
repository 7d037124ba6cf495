"""The client against a server that answers as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvboost.errors import ConfigError, ForgetError, PromptError, ServerError
from kvboost.integrations.vllm.client import Read, VllmServer


@dataclass
class Script:
    """What the server has been asked, and what it says of KVBoost."""

    url: str = ""
    said: dict[str, Any] | None = None
    refusal: str = ""
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    redirect: str = ""
    raw: bytes | None = None
    """Sent as it is, instead of an answer."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": [ord(char) for char in body["prompt"]]}
        params = None if self.said is None else {"kvboost": self.said}
        return {"usage": {"prompt_tokens": 9}, "kv_transfer_params": params}


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "a model"}, {"id": "another"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.bodies.append((self.path, body))
            script.keys.append(self.headers["authorization"])
            if script.redirect:
                self.send_response(307)
                self.send_header("location", script.redirect)
                self.send_header("content-length", "0")
                self.end_headers()
            elif script.raw is not None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(script.raw)
            elif script.refusal:
                self._send(400, {"error": {"message": script.refusal}})
            else:
                self._send(200, script.answer(self.path, body))

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_document_is_one_request_for_one_token(script: Script) -> None:
    assert VllmServer(script.url).warm("a text") == Read(tokens=9, known=0)
    script.said = {"exact_tokens": 5}
    server = VllmServer(f"{script.url}/v1/", model="another", salt="mine", api_key="secret")
    assert server.warm("a text") == Read(tokens=9, known=5)
    (path, first), (_, second) = script.bodies
    assert path == "/v1/completions"
    asked = {"kvboost": {"mode": "exact"}}
    expected = {"model": "a model", "prompt": "a text", "max_tokens": 1, "temperature": 0}
    assert first == {**expected, "kv_transfer_params": asked}
    assert second == {**first, "model": "another", "cache_salt": "mine"}
    assert script.keys == [None, "Bearer secret"]


def test_a_text_is_sent_in_tokens_and_never_as_a_prompt(script: Script) -> None:
    """A prompt would be computed, and its pages would stay in vLLM's prefix cache."""
    script.said = {"forgotten": 3}
    assert VllmServer(script.url).forget(" abc\n") == 3
    *tokenized, (path, body) = script.bodies
    assert [path for path, _ in tokenized] == ["/tokenize"] * 3
    assert {body["prompt"] for _, body in tokenized} == {"abc", " abc", "\nabc"}
    assert not any(body["add_special_tokens"] for _, body in tokenized)
    assert path == "/v1/completions" and body["prompt"] == "."
    texts = body["kv_transfer_params"]["kvboost"]["forget"]
    assert texts == [[97, 98, 99], [32, 97, 98, 99], [10, 97, 98, 99]]


def test_everything_is_one_request(script: Script) -> None:
    script.said = {"forgotten": 0}
    assert VllmServer(script.url, salt="mine").forget_everything() == 0
    ((_, body),) = script.bodies
    assert body["kv_transfer_params"] == {"kvboost": {"forget": "everything"}}
    assert body["cache_salt"] == "mine"


def test_what_may_be_left_is_an_error(script: Script) -> None:
    script.said = {"forgotten": 3, "error": "2 in remote may be left"}
    with pytest.raises(ForgetError, match=r"3 chunks .* 2 in remote may be left"):
        VllmServer(script.url).forget_everything()


def test_a_server_without_the_connector_is_named(script: Script) -> None:
    with pytest.raises(ServerError, match="without KVBoost's connector"):
        VllmServer(script.url).stats()
    script.said = {"error": "commands are off here"}
    with pytest.raises(ServerError, match="commands are off here"):
        VllmServer(script.url).stats()
    with pytest.raises(ServerError, match="commands are off here"):
        VllmServer(script.url).warm("a text")
    script.said = {"stats": {"chunks": 5}}
    assert VllmServer(script.url).stats() == {"chunks": 5}


def test_a_refusal_is_passed_on(script: Script) -> None:
    script.refusal = "the prompt is too long"
    with pytest.raises(ServerError, match="400 the prompt is too long"):
        VllmServer(script.url).warm("a text")


def test_mistakes_are_named(script: Script) -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        VllmServer("127.0.0.1:8000")
    with pytest.raises(PromptError, match="not blank"):
        VllmServer(script.url).forget("  ")
    with pytest.raises(ServerError, match="does not answer"):
        VllmServer("http://127.0.0.1:1").stats()


def test_the_key_goes_to_no_other_server(script: Script) -> None:
    """The server, or somebody between, sends the client elsewhere."""
    script.redirect = f"{script.url}/elsewhere"
    with pytest.raises(ServerError, match="refuses /v1/completions: 307"):
        VllmServer(script.url, api_key="secret").stats()
    assert [path for path, _ in script.bodies] == ["/v1/completions"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"hello", b"[" * 100_000, b"[1]", b"5", b'{"usage": 5}', b'{"kv_transfer_params": [1]}'],
)
def test_an_answer_of_another_form_is_named(raw: bytes, script: Script) -> None:
    script.raw = raw
    for ask in ("stats", "forget_everything"):
        with pytest.raises(ServerError):
            getattr(VllmServer(script.url), ask)()
    for ask in ("warm", "forget"):
        with pytest.raises(ServerError):
            getattr(VllmServer(script.url), ask)("a text")


def test_an_endless_answer_is_cut_off(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.api_client.MOST_BYTES", 1000)
    script.raw = b" " * 100_000
    with pytest.raises(ServerError, match="more than 1,000 bytes"):
        VllmServer(script.url).stats()
