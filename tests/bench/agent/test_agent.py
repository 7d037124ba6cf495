from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvboost.bench.agent.made_up import Played, Row, goals
from kvboost.bench.agent.settings import Settings
from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import Option
from kvboost.bench.peers.servers import OURS, SYSTEMS
from kvboost.bench.serve.clients import SOURCES, Answer
from support.fake_openai import FakePeer
from support.homes import use_home
from support.word_model import word_model


def row(system: str, layout: str, *ttft_s: float, healed: int | None = None) -> Row:
    """One session, a turn for each time to first token."""
    rows = dict.fromkeys(SOURCES, 10) if healed is not None else {}
    turns = [
        Played(Answer(0.0, 2 * one, one, prompt_tokens=100, cached_tokens=50, rows=rows), healed)
        for one in ttft_s
    ]
    return Row(system, layout, [turns])


def test_a_row_sums_the_turns_of_a_session() -> None:
    one = row(OURS, "append", 0.1, 0.3, healed=7)
    one.sessions += row(OURS, "append", 0.2, 0.6, healed=9).sessions
    one.sessions += row(OURS, "append", 0.2, 0.4, healed=8).sessions
    assert one.total("ttft_s") == pytest.approx(600)
    assert one.total("total_s") == pytest.approx(1200)
    assert one.turn(1) == pytest.approx((400, 300, 600))
    assert one.tokens("prompt_tokens") == 200
    assert one.rows() == {**dict.fromkeys(SOURCES, 20), "healed": 16}
    assert row("vllm", "append", 0.1).rows() == {}


def test_goals_compare_whole_sessions_with_vllm() -> None:
    rows = [row(OURS, "append", 0.1, 0.4), row("vllm", "append", 0.3, 0.1)]
    rows += [row(OURS, "files", 0.1, 0.1), row("vllm", "files", 0.3, 0.1)]
    assert [goal.met for goal in goals(rows)] == [False, True]
    assert [goal.met for goal in goals(rows[:1])] == [None, None]


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "fake", FakePeer())
    monkeypatch.setitem(SYSTEMS, "broken", FakePeer("raise SystemExit(7)"))
    use_home(monkeypatch, tmp_path)
    monkeypatch.setattr(Option, "check", lambda *_: None)  # these are not of the list
    settings = Settings(
        model=str(word_model(tmp_path)),
        systems=("broken", "fake", "vllm"),
        turns=3,
        rounds=1,
        tool_seconds=0.0,
    )
    shown = StringIO()
    report = BENCHMARKS["agent"].perform(
        settings, Console(file=shown, width=120), plot=tmp_path / "a.svg"
    )
    assert [(one["system"], one["layout"]) for one in report["rows"]] == [
        ("fake", "append"),
        ("fake", "files"),
    ]
    for one in report["rows"]:
        (turns,) = one["sessions"]
        grown = [turn["prompt_tokens"] for turn in turns]
        assert len(turns) == len(one["turns_ttft_ms"]) == 3 and grown == sorted(set(grown))
    assert "broken was given up: fake ended with 7" in shown.getvalue()
    assert list(report["missing"]) == ["vllm"]
    assert json.dumps(report)
    assert (tmp_path / "a.svg").stat().st_size
