"""What a client of a server's API says of answers that are errors."""

from __future__ import annotations

import io
from email.message import Message
from typing import Any
from urllib.error import HTTPError

import pytest

from kvboost import api_client
from kvboost.errors import ServerError


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "too many tokens"}}', "502 too many tokens$"),
        (b'{"detail": "there is no such page"}', "502 .*there is no such page"),
        (b"<h1>try later</h1>", "502 <h1>try later</h1>$"),
        (b"", "502 Bad Gateway$"),
        (b'{"error":' + b"[" * 100_000, r"502 \{"),
    ],
)
def test_a_refusal_says_what_the_server_says(
    body: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise HTTPError("http://here", 502, "Bad Gateway", Message(), io.BytesIO(body))

    monkeypatch.setattr(api_client.OPENER, "open", refuse)
    with pytest.raises(ServerError, match=said) as error:
        api_client.ApiClient("http://here", None, "vLLM's API").send("/v1/models")
    assert len(str(error.value)) < api_client.MOST_SAID + 100


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *((body, "in another form") for body in (b"[]", b'"hi"', b"null", b"<h1>", b"[" * 100_000)),
        (b'{"a": "' + b"x" * 100 + b'"}', "more than 100 bytes"),
    ],
)
def test_an_answer_that_is_no_object_or_too_long_is_refused(
    body: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client.OPENER, "open", lambda *_, **__: io.BytesIO(body))
    if "more" in said:
        monkeypatch.setattr(api_client, "MOST_BYTES", 100)
    with pytest.raises(ServerError, match=said):
        api_client.ApiClient("http://here", None, "vLLM's API").send("/v1/models")
