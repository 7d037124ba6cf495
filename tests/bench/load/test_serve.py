from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import fake_openai
from fake_engine import FakeEngine
from fake_openai import FakePeer
from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import Bench, Option
from kvboost.bench.load.serve.clients import Answer, Target, closed_loop, data_of, read_event
from kvboost.bench.load.serve.report import cut_short, inequalities, serve_figure
from kvboost.bench.load.serve.run import Settings, rotated, run
from kvboost.bench.load.serve.stats import Round, Row, goals
from kvboost.bench.load.serve.users import (
    PASSAGE_TOKENS,
    PASSAGES,
    PASSAGES_OF_A_PROMPT,
    SYSTEM_TOKENS,
    TURNS,
    WORKLOADS,
    Request,
    make_workload,
)
from kvboost.bench.peers.servers import OURS, SYSTEMS
from kvboost.errors import ConfigError, KVBoostError
from kvboost.serve.connections import Connection
from live_server import live_server
from word_model import word_model


def count_words(text: str) -> int:
    return len(text.split())


def workload(name: str, users: int = 3, requests: int = 4, seed: int = 0):
    return make_workload(name, count_words, users=users, requests=requests, seed=seed)


def passages_of(request: Request) -> list[str]:
    """The text before the question, cut at the titles."""
    return request.messages[-1]["content"].rsplit("\n\n", 1)[0].split("\n\n")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_every_time_and_another_with_another_seed(name: str) -> None:
    assert workload(name) == workload(name)
    assert workload(name) != workload(name, seed=1)
    assert [len(requests) for requests in workload(name).users] == [4, 4, 4]


def test_rag_draws_passages_of_a_pool_in_changing_orders_with_a_new_question() -> None:
    made = workload("rag", users=4, requests=6)
    prompts = [request.messages[-1]["content"] for user in made.users for request in user]
    questions = [prompt.rsplit("\n\n", 1)[1] for prompt in prompts]
    assert len(set(questions)) == len(prompts) == 24
    assert len({prompt[:200] for prompt in prompts}) > PASSAGES // 2  # beginnings change
    least, most = PASSAGES_OF_A_PROMPT
    for prompt in prompts:
        assert 0.8 * least * PASSAGE_TOKENS < count_words(prompt) < 1.1 * most * PASSAGE_TOKENS
    assert not any(request.continues for user in made.users for request in user)


def test_the_warmup_of_rag_shows_every_passage_and_asks_other_questions() -> None:
    made = workload("rag", users=8, requests=8)
    shown = {part for user in made.warmup for request in user for part in passages_of(request)}
    for user in made.users:
        for request in user:
            assert set(passages_of(request)) <= shown
    warm = {request for user in made.warmup for request in map(str, user)}
    assert not warm & {request for user in made.users for request in map(str, user)}


def test_chat_has_one_long_system_prompt_and_conversations_that_continue() -> None:
    made = workload("chat", users=3, requests=TURNS + 2)
    systems = {
        message["content"]
        for user in (*made.users, *made.warmup)
        for request in user
        for message in request.messages
        if message["role"] == "system"
    }
    assert len(systems) == 1
    assert 0.9 * SYSTEM_TOKENS < count_words(systems.pop()) <= SYSTEM_TOKENS
    for user in made.users:
        assert [at for at, request in enumerate(user) if not request.continues] == [0, TURNS]
        assert len({request.messages[-1]["content"] for request in user}) == len(user)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload='ragg' .* 'rag', 'chat'"):
        workload("ragg")


@pytest.mark.parametrize(
    ("line", "data"),
    [
        ("data: {}", "{}"),
        ("data:{}", "{}"),
        ("data:  two blanks", " two blanks"),
        (": comment", None),
        ("", None),
        ("event: message", None),
        ("data", None),
    ],
)
def test_lines_of_an_event_stream(line: str, data: str | None) -> None:
    assert data_of(line) == data


def test_a_chunk_may_hold_text_usage_both_or_an_error() -> None:
    answer = Answer(0.0)
    assert read_event('{"choices": [{"delta": {"role": "assistant"}}]}', answer) == ""
    assert read_event('{"choices": [{"delta": {"content": null}}]}', answer) == ""
    assert read_event('{"choices": [{"delta": {"content": "hi"}}], "usage": null}', answer) == "hi"
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    ours = {"approximate_tokens": 1, "moved_tokens": 3, "recomputed_tokens": 2, "ttft_ms": 250.0}
    assert read_event(json.dumps({"choices": [], "usage": usage, "kvboost": ours}), answer) == ""
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 4)
    assert (answer.moved_tokens, answer.server_ttft_s) == (2, 0.25)
    assert answer.error is None
    read_event('{"error": {"message": "out of memory"}}', answer)
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
    made = Connection.connection_made
    accepted: list[Connection] = []
    monkeypatch.setattr(
        Connection,
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
    assert answer.error.startswith("ConnectError")


def test_a_slow_server_is_sent_no_more_when_time_is_up() -> None:
    with fake_openai.serving(pause_s=0.1) as fake:
        server = Target(fake.url, "fake", 1, seconds=0.05)
        answers = asyncio.run(closed_loop(server, [talk(*"abc")]))
    assert len(answers) == len(fake.bodies) == 1


def answered(ttft_s: float, sent_s: float = 0.0, error: str | None = None) -> Answer:
    return Answer(
        sent_s,
        total_s=ttft_s + 0.3,
        ttft_s=None if error else ttft_s,
        gaps_s=[] if error else [0.1, 0.2],
        prompt_tokens=100,
        completion_tokens=3,
        cached_tokens=20,
        moved_tokens=15,
        server_ttft_s=ttft_s - 0.002,
        error=error,
    )


def test_a_round_counts_what_was_answered() -> None:
    answers = [answered(0.1), answered(0.2, 1.0), answered(0.3, 2.0), answered(9.0, error="no")]
    one = Round.of(answers[:3])
    assert (one.requests, one.errors) == (3, 0)
    assert one.ttft_p50_ms == pytest.approx(200)
    assert one.ttft_p95_ms == pytest.approx(290)
    assert one.itl_p50_ms == pytest.approx(150)
    assert one.itl_p95_ms == pytest.approx(200)
    assert one.seconds == pytest.approx(2.6)
    assert one.requests_per_s == pytest.approx(3 / 2.6)
    assert one.tokens_per_s == pytest.approx(9 / 2.6)
    assert (one.cached_share, one.moved_share) == pytest.approx((0.2, 0.15))
    assert one.beyond_server_p50_ms == pytest.approx(2)
    failed = Round.of(answers)
    assert (failed.requests, failed.errors) == (4, 1)
    assert failed.ttft_p50_ms == pytest.approx(200)


def row(system: str, name: str, ttft_s: Sequence[float], at_once: int = 1, users: int = 1) -> Row:
    """A round for each time to first token, of ``at_once`` requests at once."""
    rounds = [Round.of([answered(one)] * at_once) for one in ttft_s]
    return Row.of(system, name, users, rounds)


def test_a_row_holds_medians_over_rounds() -> None:
    assert row("vllm", "rag", [0.1, 0.9, 0.2]).median.ttft_p50_ms == pytest.approx(200)
    said = row("vllm", "rag", [0.1, 0.9, 0.2]).as_json()
    assert said["ttft_p50_ms"] == pytest.approx(200)
    assert len(said["rounds"]) == 3  # type: ignore[arg-type]


def test_goals_are_met_or_not_or_not_measured() -> None:
    ours = [row(OURS, "rag", [0.1], at_once=4), row(OURS, "chat", [0.3], at_once=2)]
    theirs = [row("vllm", "rag", [0.2], at_once=2), row("vllm", "chat", [0.3], at_once=2)]
    best = row("llama.cpp", "rag", [0.1], at_once=5)
    assert [goal.met for goal in goals([*ours, *theirs])] == [False, True, True, True]
    assert [goal.met for goal in goals([*ours, *theirs, best])] == [False, False, True, True]
    assert [goal.met for goal in goals(ours)] == [None] * 4
    quicker = row(OURS, "rag", [0.08], at_once=4)
    assert goals([quicker, *theirs])[0].met
    few = row("vllm", "rag", [0.01], users=0)
    assert goals([quicker, *theirs, few])[0].met  # as with the most users


def test_systems_that_did_not_have_the_same_work_are_named() -> None:
    rows = [row("vllm", "rag", [0.1]), row("llama.cpp", "rag", [0.1])]
    assert list(inequalities(rows)) == []
    longer = answered(0.1)
    longer.completion_tokens = 5
    rows.append(Row.of(OURS, "rag", 1, [Round.of([longer])]))
    assert list(inequalities(rows)) == [
        "rag, 1 users: mean completion tokens differ: vllm 3.0, llama.cpp 3.0, kvboost 5.0"
    ]
    assert "; 1 were sent" in next(cut_short(rows, requests=2))
    assert list(cut_short(rows, requests=1)) == []


def test_a_picture_is_drawn_even_if_a_system_lacks_a_workload() -> None:
    rows = [row("vllm", "rag", [0.1]), row(OURS, "rag", [0.2]), row(OURS, "chat", [0.2])]
    times, rates = serve_figure(rows, "a test").axes
    assert len(times.patches) == len(rates.patches) == 3


def test_each_round_another_system_comes_first() -> None:
    assert rotated(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return word_model(tmp_path)


def test_a_whole_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "fake", FakePeer())
    monkeypatch.setitem(SYSTEMS, "broken", FakePeer("raise SystemExit(7)"))
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setattr(Option, "check", lambda *_: None)  # these are not of the list
    shown = StringIO()
    settings = Settings(
        model=str(model),
        systems=("broken", "fake", "vllm"),
        workloads=("rag", "chat"),
        users=(2, 1),
        requests=2,
        max_tokens=2,
        rounds=2,
    )
    plot, saved = tmp_path / "s.svg", tmp_path / "serve.json"
    console = Console(file=shown, width=120)
    report = BENCHMARKS["serve"].perform(settings, console, plot=plot, output=saved)
    assert json.loads(saved.read_text()) == json.loads(json.dumps(report))
    rows = report["rows"]
    assert [(one["workload"], one["users"], len(one["rounds"])) for one in rows] == [
        *(("rag", 2, 2), ("rag", 1, 2), ("chat", 2, 2), ("chat", 1, 2))
    ]
    assert all(one["errors"] == 0 and one["requests"] == 2 * one["users"] for one in rows)
    assert "broken was given up: fake ended with 7" in shown.getvalue()
    assert "vllm is missing: not set up" in shown.getvalue()
    assert list(report["missing"]) == ["vllm"]
    assert [goal["text"] for goal in report["goals"]] == list(BENCHMARKS["serve"].goals)


def test_a_run_needs_a_system_to_measure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(model))
    settings = Settings(model=str(model), systems=("vllm",), workloads=("rag",))
    with pytest.raises(KVBoostError, match="none of the chosen systems is here"):
        run(settings, Bench(Console(file=StringIO()), settings))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("systems", ("vlm",), "system='vlm' .* 'vllm'"),
        ("workloads", ("x",), "workload='x'"),
        ("users", (0,), "users=0"),
        ("seconds", 0.0, "seconds=0.0"),
    ],
)
def test_settings_say_what_is_wrong(option: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**{option: value})
