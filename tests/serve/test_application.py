"""The direct way to routes that answer: it must do what FastAPI's own way does."""

from __future__ import annotations

import pytest

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def test_a_route_with_a_body_passes_through_no_layer_of_fastapi(client, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("FastAPI looked for the route")

    client.get("/health")  # builds the layers
    monkeypatch.setattr(client.app.router, "middleware_stack", refuse)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.endswith(
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/chat", 404),
        ("GET", "/v1/models/fake", 200),
    ],
)
def test_other_requests_go_to_fastapi(client, method, path, status) -> None:
    assert client.request(method, path).status_code == status
