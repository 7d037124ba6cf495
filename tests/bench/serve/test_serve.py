from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import Bench, Option
from kvboost.bench.peers.process import Running
from kvboost.bench.peers.servers import OURS, SYSTEMS
from kvboost.bench.serve.clients import Answer
from kvboost.bench.serve.costs import Costs, watched
from kvboost.bench.serve.report import cut_short, inequalities, tables
from kvboost.bench.serve.run import Settings, run
from kvboost.bench.serve.stats import Round, Row, goals
from kvboost.errors import KVBoostError
from support import fake_openai
from support.fake_engine import FakeEngine
from support.fake_openai import FakePeer
from support.homes import use_home
from support.live_server import live_server
from support.word_model import word_model


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
    one = Round.of(answers[:3], Costs(loop_s=0.03, process_s=0.3, gpu_share=0.5))
    assert (one.requests, one.errors) == (3, 0)
    assert one.ttft_p50_ms == pytest.approx(200)
    assert one.ttft_p95_ms == pytest.approx(290)
    assert one.itl_p50_ms == pytest.approx(150)
    assert one.itl_p95_ms == pytest.approx(200)
    assert one.seconds == pytest.approx(2.6)
    assert one.requests_per_s == pytest.approx(3 / 2.6)
    assert (one.cached_share, one.moved_share) == pytest.approx((0.2, 0.15))
    assert one.beyond_server_p50_ms == pytest.approx(2)
    assert (one.loop_cpu_ms, one.process_cpu_ms) == pytest.approx((10, 100))
    failed = Round.of(answers, Costs())
    assert failed.loop_cpu_ms is None and failed.gpu_share is None
    assert (failed.requests, failed.errors) == (4, 1)
    assert failed.ttft_p50_ms == pytest.approx(200)


def row(system: str, name: str, ttft_s: Sequence[float], at_once: int = 1, users: int = 1) -> Row:
    """A round for each time to first token, of ``at_once`` requests at once."""
    rounds = [Round.of([answered(one)] * at_once, Costs()) for one in ttft_s]
    return Row.of(system, name, users, rounds)


def test_rates_are_compared_with_the_rival_round_by_round() -> None:
    rival = row("vllm", "rag", [0.1, 0.2, 0.3])  # a request takes 0.3 s longer
    ours = row(OURS, "rag", [0.1, 0.1, 0.7], at_once=2)
    assert ours.against(rival) == pytest.approx((2.0, 1.2, 2.5))
    other = row("vllm", "rag", [9.0], users=2)
    said = ours.as_json([other, rival])
    assert said["rate_of_rival"] == pytest.approx({"value": 2.0, "low": 1.2, "high": 2.5})
    console = Console(file=StringIO(), width=80)
    for one in tables([ours, rival]):
        console.print(one)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2.00 [1.20-2.50]" in shown and "5.00 [2.00-5.00]" in shown and "…" not in shown


def test_what_a_load_costs_is_read_from_the_server() -> None:
    engine = FakeEngine()
    with live_server(engine) as live:
        here = Running(live.url, "fake", os.getsid(0), 0.0)
        with watched(here, "cpu") as costs:
            until = time.process_time() + 0.1
            while time.process_time() < until:
                pass
            engine.loop_cpu_seconds += 1.5
    assert costs.loop_s == pytest.approx(1.5)
    assert costs.process_s is not None and costs.process_s >= 0.09
    assert costs.gpu_share is None


def test_a_server_that_tells_nothing_or_is_gone_has_no_loop_time() -> None:
    with fake_openai.serving() as fake:
        there = Running(fake.url, "fake", os.getsid(0), 0.0)
        with watched(there, "cpu") as costs:
            pass
    assert costs.loop_s is None and costs.process_s is not None
    with watched(there, "cpu") as costs:
        pass
    assert costs.loop_s is None


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
    rows.append(Row.of(OURS, "rag", 1, [Round.of([longer], Costs())]))
    assert list(inequalities(rows)) == [
        "rag, 1 users: mean completion tokens differ: vllm 3.0, llama.cpp 3.0, kvboost 5.0"
    ]
    assert "; 1 were sent" in next(cut_short(rows, requests=2))
    assert list(cut_short(rows, requests=1)) == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return word_model(tmp_path)


def test_a_whole_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "fake", FakePeer())
    monkeypatch.setitem(SYSTEMS, "broken", FakePeer("raise SystemExit(7)"))
    use_home(monkeypatch, tmp_path)
    monkeypatch.setattr(Option, "check", lambda *_: None)  # these are not of the list
    shown = StringIO()
    settings = Settings(
        model=str(model),
        systems=("broken", "fake", "vllm"),
        workloads=("rag", "agent"),
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
        *(("rag", 2, 2), ("rag", 1, 2), ("agent", 2, 2), ("agent", 1, 2))
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
