from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import run_all as module
from benchmarks.entries import BENCHMARKS
from benchmarks.run_all import (
    FULL_SECONDS,
    QUICK_SECONDS,
    Outcome,
    jobs,
    judge,
    run_all,
    run_process,
)
from kvboost.errors import ConfigError


def test_all_limits_together_fit_the_time_that_was_promised() -> None:
    every = jobs()
    assert sum(job.seconds for job in every) < FULL_SECONDS < 90 * 60
    assert sum(job.quick_seconds for job in every) < QUICK_SECONDS < 3 * 60
    assert all((job.quick is None) == (job.quick_seconds == 0) for job in every)


def results(outcomes):
    return {one["name"]: one["state"] for one in outcomes}


def test_a_benchmark_that_fails_or_hangs_does_not_stop_the_rest(tmp_path) -> None:
    asked = []

    def run(arguments, log: Path, seconds: float):
        asked.append(arguments)
        name = arguments[0]
        if name == "serve":
            return None, ""
        if name == "agent":
            log.write_text("Traceback\nValueError: wrong\n")
            return 1, ""
        if name == "quality":
            return 0, "no json"
        report = {"benchmark": name, "machine": {"cpu": "x"}, "cost": _sample()}
        return 0, f"a table\n{json.dumps(report)}\n"

    report = run_all(tmp_path / "out", Console(quiet=True), run=run)
    states = results(report["outcomes"])
    assert states["serve"] == "timed out"
    assert states["agent"] == states["quality"] == "failed"
    assert states["ttft"] == "ok"
    detail = {one["name"]: one["detail"] for one in report["outcomes"]}
    assert detail["agent"] == "ValueError: wrong"
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ok = [name for name, state in states.items() if state == "ok"]
    assert [json.loads(line)["benchmark"] for line in lines] == ok
    quality = next(arguments for arguments in asked if arguments[0] == "quality")
    assert quality[-2:] == ["--plot", str(tmp_path / "out" / "quality.png")]


def _sample() -> dict[str, float]:
    return {"median_ms": 1.0, "min_ms": 1.0, "max_ms": 1.0}


def test_the_quick_form_runs_what_has_one(tmp_path) -> None:
    def run(arguments, log, seconds):
        assert seconds <= 90
        return 0, json.dumps({"benchmark": arguments[0], "machine": {}, "cost": _sample()})

    report = run_all(tmp_path, Console(quiet=True), quick=True, run=run)
    states = results(report["outcomes"])
    assert states["serve"] == "skipped" and states["ttft"] == "ok"
    with pytest.raises(ConfigError, match="only='nonsense' is not available"):
        run_all(tmp_path, Console(quiet=True), only=["nonsense"], run=run)
    chosen = run_all(tmp_path, Console(quiet=True), only=["ttft"], quick=True, run=run)
    assert results(chosen["outcomes"]) == {"ttft": "ok"}


def test_nothing_begins_when_the_time_is_over(tmp_path, monkeypatch) -> None:
    given = []

    def run(arguments, log, seconds):
        given.append(seconds)
        return 0, json.dumps({"benchmark": arguments[0]})

    monkeypatch.setattr(module, "QUICK_SECONDS", 10)
    monkeypatch.setattr(module, "monotonic", iter(range(0, 1000, 4)).__next__)
    report = run_all(tmp_path, Console(quiet=True), quick=True, run=run)
    assert given == [6]  # what is left, as it is less than they may take
    states = results(report["outcomes"])
    assert states["quality"] == "left out" and states["serve"] == "skipped"


def outcome(name: str, **report: object) -> Outcome:
    return Outcome(name, "ok", 1.0, 10, "", {"benchmark": name, **report})


def goal(text: str, met: bool | None) -> dict[str, object]:
    return {"text": text, "met": met, "figure": f"{text}!"}


def test_goals_are_met_not_met_or_not_run() -> None:
    stock, peers, moved, *_ = BENCHMARKS["ttft"].goals
    said = [goal(stock, True), goal(peers, False), goal(moved, None)]
    judged = {one.text: one for one in judge([outcome("ttft", goals=said), outcome("serve")])}
    assert [judged[text].met for text in (stock, peers, moved)] == [True, False, None]
    assert judged[stock].figure == f"{stock}!"
    rag = BENCHMARKS["serve"].goals[0]
    assert (judged[rag].met, judged[rag].figure) == (None, "not run")
    assert [*judged] == [*BENCHMARKS["ttft"].goals, *BENCHMARKS["serve"].goals]


def test_a_process_that_takes_too_long_is_ended(tmp_path, monkeypatch) -> None:
    slow = tmp_path / "benchmarks.py"
    slow.write_text(
        "import sys, time\nprint('begun', flush=True)\ntime.sleep(float(sys.argv[1]))\n"
    )

    monkeypatch.chdir(tmp_path)
    status, printed = run_process(["60"], tmp_path / "log", 2.0)
    assert status is None and printed == "begun\n"
    status, _ = run_process(["0"], tmp_path / "log", 30.0)
    assert status == 0 and (tmp_path / "log").read_text() == "begun\n"
