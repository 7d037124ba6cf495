"""The text of tokens, where tokens cut characters and stop strings."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvboost.results import TokenLogprob
from kvboost.serve.answers.logprobs import TokenReader, chat_logprobs, completion_logprobs
from kvboost.serve.http.streaming import JsonBytes

WORDS = {1: b"Hel", 2: b"lo", 3: b"\xc3", 4: b"\xa9", 5: b"", 6: b"STOP"}


def decode(ids) -> str:
    return b"".join(WORDS[one] for one in ids).decode("utf-8", "replace")


def read(*ids: int, **top: object) -> list[TokenLogprob]:
    return [TokenLogprob(one, -one / 10, **top) for one in ids]


def test_tokens_are_taken_when_their_text_is_shown() -> None:
    reader = TokenReader(decode, last_id=1)
    (first,) = reader.take(read(1), shown=3)
    assert (first.text, first.offset, first.logprob) == ("Hel", 0, -0.1)
    assert reader.take(read(1), shown=3) == []
    (second,) = reader.take(read(1, 2), shown=5)
    assert (second.text, second.offset) == ("lo", 3)


def test_a_character_of_two_tokens_belongs_to_both() -> None:
    reader = TokenReader(decode, last_id=1)
    tokens = reader.take(read(1, 3, 4, 2), shown=6)
    assert [token.offset for token in tokens] == [0, 3, 3, 4]
    assert [token.shown for token in tokens] == ["Hel", "", "é", "lo"]
    content = chat_logprobs(tokens)["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "Helélo"


def test_tokens_after_the_answer_are_left_out() -> None:
    """A stop string, and the end of the sequence."""
    reader = TokenReader(decode, last_id=1)
    assert [token.token_id for token in reader.take(read(1, 6, 5), shown=3)] == [1]
    assert reader.take(read(1, 6, 5), shown=3) == []


def test_the_blank_before_a_word_is_shown() -> None:
    def strips(ids) -> str:  # as tokenizers of the sentencepiece family do
        return "".join({1: " a", 2: " b"}[one] for one in ids).removeprefix(" ")

    reader = TokenReader(strips, last_id=1)
    tokens = reader.take([TokenLogprob(2, -1.0, ((1, -2.0),))], shown=2)
    assert tokens[0].text == " b" and tokens[0].top == ((" a", 1, -2.0),)


def test_tokens_with_the_same_text_are_named_by_id() -> None:
    reader = TokenReader(decode, last_id=1)
    top = ((2, -0.1), (3, -0.2), (4, -0.3), (5, -0.4))
    shape = completion_logprobs(reader.take(read(2, top=top), shown=2))
    assert shape["tokens"] == ["lo"] and shape["text_offset"] == [0]
    assert shape["top_logprobs"] == [
        {"lo": -0.2, "\ufffd": -0.2, "token_id:4": -0.3, "token_id:5": -0.4}
    ]


def test_chat_shows_alternatives_and_their_bytes() -> None:
    reader = TokenReader(decode, last_id=1)
    shape = chat_logprobs(reader.take(read(1, top=((1, -0.1), (3, -2.0))), shown=3))
    (token,) = shape["content"]
    assert token["bytes"] == list(b"Hel")
    assert [one["bytes"] for one in token["top_logprobs"]] == [list(b"Hel"), None]


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
ECHO = {"model": "fake", "prompt": ["hi", "ho"], "echo": True, "logprobs": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "n": 2}),
        ("/v1/completions", ECHO),
        ("/v1/completions", {**ECHO, "max_tokens": 0, "stream": True}),
        ("/api/chat", {**CHAT, "logprobs": True, "stream": False}),
    ],
)
def test_log_probabilities_are_written_in_a_thread(
    client, fake, monkeypatch, path: str, body: dict[str, Any]
) -> None:
    """A long answer takes seconds, in which the event loop would answer nobody else."""
    threads: dict[str, set[int]] = {"loop": set(), "decode": set(), "encode": set()}

    def noting(kind: str, of: object, name: str) -> None:
        work = getattr(of, name)

        def noted(*given: Any, **more: Any) -> Any:
            threads[kind].add(threading.get_ident())
            return work(*given, **more)

        monkeypatch.setattr(of, name, noted)

    noting("loop", fake, "astream")
    noting("decode", fake, "decode")
    noting("encode", JsonBytes, "render")
    assert client.post(path, json=body).status_code == 200
    assert threads["loop"] and threads["decode"]
    assert threads["encode"] or body.get("stream")
    assert not threads["loop"] & (threads["decode"] | threads["encode"])
