"""Errors in OpenAI's format, and no text of a prompt in the log."""

from __future__ import annotations

import logging

import pytest
from pydantic import TypeAdapter

from kvboost.errors import (
    ConfigError,
    ContextLengthError,
    KVTooLargeError,
    PromptError,
    QueueFullError,
    RankLostError,
    ShuttingDownError,
    StructuredOutputError,
)
from kvboost.serve.errors import LONGEST_MESSAGE

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "my secret plan"}]}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (ContextLengthError(300, 256), 400, "context_length_exceeded"),
        (KVTooLargeError(50, 2048, 1024), 413, "kv_bytes_exceeded"),
        (QueueFullError(64, 3), 429, "queue_full"),
        (ShuttingDownError(), 503, "shutting_down"),
        (RankLostError("rank 1 has ended"), 503, "rank_lost"),
        (PromptError("no such token"), 400, "invalid_prompt"),
        (ConfigError("stop=() must hold strings"), 400, "invalid_value"),
        (RuntimeError("my secret plan failed"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_have_their_status_and_code(
    client, fake, raised, status, code, stream
) -> None:
    fake.refuse = raised
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    assert "secret" not in answer.text
    if code.endswith("_exceeded"):
        assert any(number in error["message"] for number in ("300", "2,048"))
    if status == 429:
        assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("timeout", 504, "timeout"),
        ("cancelled", 503, "shutting_down"),
        ("error", 500, "internal_error"),
    ],
)
def test_an_answer_that_did_not_finish_is_an_error(client, fake, reason, status, code) -> None:
    fake.finish_reason = reason
    assert client.post("/v1/chat/completions", json=CHAT).status_code == status
    streamed = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert streamed.status_code == 200 and "[DONE]" not in streamed.text
    assert f'"code":"{code}"' in streamed.text.split("\n\n")[-2]


@pytest.mark.parametrize("stream", [False, True])
def test_the_message_of_a_failure_is_neither_sent_nor_logged(client, fake, caplog, stream) -> None:
    caplog.set_level(logging.INFO)
    fake.pieces = ("Hel", RuntimeError("my secret plan failed"))
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert "internal_error" in answer.text
    assert "secret" not in answer.text and "Traceback" not in answer.text
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


def test_prompts_are_logged_only_with_log_prompts(serve_fake, caplog) -> None:
    caplog.set_level(logging.INFO)
    serve_fake().post("/v1/chat/completions", json=CHAT)
    assert "secret" not in caplog.text
    serve_fake(log_prompts=True).post("/v1/chat/completions", json=CHAT)
    assert "my secret plan" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no body"),
        (b"{", "not JSON"),
        (b"[1]", "object"),
        (b"nonsense", "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        ('{"model": "a"}'.encode("utf-16"), "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model":"fake","prompt":"a","seed":' + b"9" * 5000 + b"}", "more than 400 digits"),
        (b'{"model":"fake","prompt":"a","temperature":NaN}', "not JSON"),
        (b'{"model":"fake","prompt":"a","temperature":Infinity}', "not JSON"),
        (b'{"model":"fake","prompt":"a","temperature":1' + b"0" * 390 + b"}", "valid number"),
        (b'{"model":"fake","prompt":["\\ud800"]}', "surrogate"),
        (b'{"model":"fake","prompt":"a","user":"\\udfff"}', "surrogate"),
        (b'{"model":"fake","prompt":"a","\\ud800":1}', "surrogate"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(client, content, message) -> None:
    refused = client.post("/v1/completions", content=content, headers=JSON)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]


def test_a_prompt_may_contain_null_bytes(client, fake) -> None:
    asked = {"model": "fake", "prompt": "a\0b"}
    assert client.post("/v1/completions", json=asked).status_code == 200
    assert fake.asked[0]["prompt"] == [97, 0, 98]


def test_an_unknown_model_is_refused(client) -> None:
    refused = client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-7"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "model_not_found" and "there is fake" in error["message"]


def test_an_unknown_path_does_not_make_the_openapi_document(client) -> None:
    """Making it takes a second, and such a request needs no key."""
    for path in ("/nothing", "/v1/chat/completions"):
        assert client.get(path).status_code in (404, 405)
    assert client.app.openapi_schema is None
    assert client.get("/openapi.json").status_code == 200
    assert client.app.openapi_schema is not None


def test_unknown_paths_and_methods_are_refused(client) -> None:
    unknown = client.post("/v1/images/generations", json={"prompt": "a"})
    assert unknown.status_code == 404
    message = unknown.json()["error"]["message"]
    assert message.startswith("there is no /v1/images/generations here; the endpoints are ")
    assert "POST /v1/chat/completions" in message and "GET /v1/models" in message
    wrong = client.get("/v1/chat/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    message = wrong.json()["error"]["message"]
    assert message == "GET is not allowed on /v1/chat/completions; use POST"
    for path, allowed in (("/kvboost/documents/doc_1", "GET, DELETE"), ("/v1/models/a/b", "GET")):
        assert client.put(path).headers["allow"] == allowed


def test_an_option_is_called_by_the_field_that_has_it_in_a_message_of_limited_length(
    client, fake
) -> None:
    for value in ("True", "x" * 10**6):
        fake.refuse = ConfigError(f"template_options: a={value} cannot be given")
        refused = client.post("/v1/chat/completions", json=CHAT).json()["error"]
        assert refused["param"] == "chat_template_kwargs"
        assert refused["message"].startswith(f"chat_template_kwargs: a={value[:9]}")
        assert len(refused["message"]) <= LONGEST_MESSAGE
    assert refused["message"].endswith("x...")


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_fails_while_it_runs_is_called_by_its_field(client, fake, stream) -> None:
    fake.pieces = ("a", StructuredOutputError("grammar", "too many expressions"))
    body = {**CHAT, "stream": stream, "guided_regex": "a+"}
    failed = client.post("/v1/chat/completions", json=body).text
    assert "guided_regex cannot be enforced: too many expressions" in failed
    assert '"param":"guided_regex"' in failed and '"code":"unsupported_format"' in failed


def test_a_value_of_ours_that_is_wrong_is_no_mistake_of_the_client(client, fake, monkeypatch):
    def fail(_: object) -> None:
        TypeAdapter(int).validate_python("secret")

    monkeypatch.setattr(fake, "render", fail)
    asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 500 and "secret" not in answer.text
