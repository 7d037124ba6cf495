from __future__ import annotations

import asyncio
import json
import multiprocessing
import re

import pytest

from kvboost.bench.serve.clients import Answer, Target, closed_loop, data_of, read_event
from kvboost.bench.serve.connection import Connection
from kvboost.bench.serve.processes import Clients
from kvboost.bench.serve.users import Request
from kvboost.errors import KVBoostError
from kvboost.serve.http.connections import Connection as ServedConnection
from support import fake_openai
from support.fake_engine import FakeEngine
from support.live_server import live_server


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data: {}", b"{}"),
        (b"data:{}", b"{}"),
        (b"data: cut\r", b"cut"),
        (b": comment", None),
        (b"", None),
        (b"event: message", None),
        (b"data", None),
    ],
)
def test_lines_of_an_event_stream(line: bytes, data: bytes | None) -> None:
    assert data_of(line) == data


def test_a_chunk_may_hold_text_usage_both_or_an_error() -> None:
    answer = Answer(0.0)
    assert read_event(b'{"choices": [{"delta": {"role": "assistant"}}]}', answer) == ""
    assert read_event(b'{"choices": [{"delta": {"content": null}}]}', answer) == ""
    assert read_event(b'{"choices": [{"delta": {"content": "hi"}}], "usage": null}', answer) == "hi"
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    ours = {"approximate_tokens": 1, "moved_tokens": 3, "recomputed_tokens": 2, "ttft_ms": 250.0}
    assert (
        read_event(json.dumps({"choices": [], "usage": usage, "kvboost": ours}).encode(), answer)
        == ""
    )
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 4)
    assert (answer.moved_tokens, answer.server_ttft_s) == (2, 0.25)
    assert answer.error is None
    read_event(b'{"error": {"message": "out of memory"}}', answer)
    assert answer.error == "out of memory"


def talk(*contents: str, continues: bool = True) -> tuple[Request, ...]:
    """Requests of one user, each of one message."""
    return tuple(
        Request(({"role": "user", "content": content},), continues and number > 0)
        for number, content in enumerate(contents)
    )


def test_users_wait_for_answers_and_send_them_back() -> None:
    with fake_openai.serving(pause_s=0.02) as fake:
        server = Target(fake.url, "fake", 3, {"2": -100})
        answers = asyncio.run(closed_loop(server, [talk("a", "b"), talk("c", "d")]))
    assert [answer.text for answer in answers] == ["w0 w1 w2 "] * 4
    assert [answer.error for answer in answers] == [None] * 4
    assert fake.most_running == 2
    (first,) = (
        body for body in fake.bodies if [one["content"] for one in body["messages"]] == ["a"]
    )
    assert first == {
        "model": "fake",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "temperature": 0,
        "logit_bias": {"2": -100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    said = [[message["content"] for message in body["messages"]] for body in fake.bodies]
    assert ["a", "w0 w1 w2 ", "b"] in said
    assert ["c", "w0 w1 w2 ", "d"] in said


def test_users_keep_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ServedConnection.connection_made
    accepted: list[ServedConnection] = []
    monkeypatch.setattr(
        ServedConnection,
        "connection_made",
        lambda self, *given: (accepted.append(self), made(self, *given)),
    )
    with live_server(FakeEngine()) as live:
        target = Target(live.url, "fake", 3)
        answers = asyncio.run(closed_loop(target, [talk("a", "b", "c"), talk("d", "e")]))
    assert [answer.error for answer in answers] == [None] * 5
    assert len(accepted) == 2


def test_the_clock_stamps_every_piece() -> None:
    with fake_openai.serving(pause_s=0.05) as fake:
        (answer,) = asyncio.run(closed_loop(Target(fake.url, "fake", 4), [talk("one two")]))
    assert answer.ttft_s is not None
    assert 0.05 <= answer.ttft_s < answer.total_s
    assert len(answer.gaps_s) == 3
    assert all(gap > 0.02 for gap in answer.gaps_s)
    assert answer.total_s >= 0.2
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (2, 4, 1)


def test_a_refused_request_is_an_error_and_the_others_go_on() -> None:
    with fake_openai.serving(refuse="bad") as fake:
        server = Target(fake.url, "fake", 1)
        answers = asyncio.run(closed_loop(server, [talk("bad", "good", continues=False)]))
    assert answers[0].error is not None
    assert re.search(r"HTTP 429.*the queue is full", answers[0].error)
    assert answers[1].error is None


def test_a_server_that_is_gone_is_an_error() -> None:
    server = Target("http://127.0.0.1:1", "fake", 1)
    (answer,) = asyncio.run(closed_loop(server, [talk("hello")]))
    assert answer.error is not None
    assert answer.error.startswith("ConnectionRefusedError")


def test_a_slow_server_is_sent_no_more_when_time_is_up() -> None:
    with fake_openai.serving(pause_s=0.1) as fake:
        server = Target(fake.url, "fake", 1, seconds=0.05)
        answers = asyncio.run(closed_loop(server, [talk(*"abc")]))
    assert len(answers) == len(fake.bodies) == 1


def test_a_server_that_answers_too_late_is_an_error() -> None:
    with fake_openai.serving(pause_s=0.5) as fake:
        (answer,) = asyncio.run(closed_loop(Target(fake.url, "fake", 1, timeout=0.05), [talk("a")]))
    assert answer.error == "no whole answer within 0.05 s"


def test_a_connection_reads_bodies_of_every_kind() -> None:
    async def read(url: str, path: str) -> list[bytes]:
        connection = Connection(url)
        try:
            return [line async for line in connection.lines("GET", path)]
        finally:
            connection.close()

    with live_server(FakeEngine()) as live:
        (health,) = asyncio.run(read(live.url, "/health"))
        with pytest.raises(ValueError, match=r"HTTP 404: .*/nowhere"):
            asyncio.run(read(live.url, "/nowhere"))
    assert isinstance(json.loads(health), dict)


def test_processes_share_the_users_and_begin_together() -> None:
    told = []
    with Clients(3) as clients, fake_openai.serving(together=5) as fake:
        users = [talk(f"{name}1", f"{name}2") for name in "abcde"]
        for _ in range(2):  # one load after the other
            answers = clients.load(Target(fake.url, "fake", 3), users, lambda: told.append(1))
            assert [answer.error for answer in answers] == [None] * 10
            assert all(answer.sent_s >= 0 for answer in answers)
    assert len(told) == 20
    first = [body["messages"][0]["content"] for body in fake.bodies]
    assert sorted(first) == sorted([f"{name}1" for name in "abcde"] * 4)
    assert not multiprocessing.active_children()


def test_a_client_process_that_dies_is_an_error() -> None:
    with fake_openai.serving(pause_s=0.2) as fake, Clients(2) as clients:
        target, killed = Target(fake.url, "fake", 3), multiprocessing.active_children()[0]
        with pytest.raises(KVBoostError, match="clients has ended"):
            clients.load(target, [talk("a", "b"), talk("c", "d")], lambda: killed.kill())
