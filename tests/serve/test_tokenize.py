"""Tokens of texts and conversations, in vLLM's form."""

from __future__ import annotations

import kvboost
from kvboost.serve.settings import ApiKey


def test_a_text_or_a_conversation_is_tokenized_and_tokens_become_text(client) -> None:
    told = client.post("/tokenize", json={"model": "fake", "prompt": "hi"}).json()
    assert told == {"count": 2, "max_model_len": 100, "tokens": [104, 105], "token_strs": None}
    asked = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    told = client.post("/tokenize", json=asked).json()
    assert bytes(told["tokens"]) == b"user:hi" and len(told["token_strs"]) == told["count"] == 7
    answer = client.post("/detokenize", json={"tokens": [104, 105]})
    assert set(answer.json()) == {"prompt"}
    assert client.get("/version").json() == {"version": kvboost.__version__}


def test_mistakes_are_named(client) -> None:
    for path, asked, param in (
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "x" * 200}, "messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ):
        refused = client.post(path, json=asked)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in (param, "prompt")
    assert client.post("/tokenize", json={"model": "x", "prompt": "a"}).status_code == 404


def test_a_key_is_needed_if_there_are_keys(serve_fake) -> None:
    client = serve_fake(keys=(ApiKey("ann", "k-ann"),))
    for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert client.post(path, json=asked).status_code == 401
        headers = {"authorization": "Bearer k-ann"}
        assert client.post(path, json=asked, headers=headers).status_code == 200
    assert client.get("/version").status_code == 200
