from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvboost.bench import full
from kvboost.bench.full import (
    FULL_SECONDS,
    GOALS,
    JOBS,
    QUICK_SECONDS,
    Outcome,
    judge,
    run_all,
    run_process,
)
from kvboost.errors import ConfigError


def test_all_limits_together_fit_the_time_that_was_promised() -> None:
    assert sum(job.seconds for job in JOBS) < FULL_SECONDS < 90 * 60
    assert sum(job.quick_seconds for job in JOBS) < QUICK_SECONDS < 3 * 60
    assert all((job.quick is None) == (job.quick_seconds == 0) for job in JOBS)
    assert len({job.name for job in JOBS}) == len(JOBS)
    assert set(GOALS) <= {job.name for job in JOBS}


def results(outcomes):
    return {one["name"]: one["state"] for one in outcomes}


def test_one_that_fails_hangs_or_is_missing_does_not_stop_the_rest(tmp_path) -> None:
    asked = []

    def run(arguments, log: Path, seconds: float):
        asked.append(arguments)
        name = arguments[1]
        if name == "breakdown":
            return None, ""
        if name == "interior":
            log.write_text("Error: No such command 'interior'.\n")
            return 2, ""
        if name == "sweep":
            log.write_text("Traceback\nValueError: wrong\n")
            return 1, ""
        if name == "memory":
            return 0, "no json"
        report = {"benchmark": name, "machine": {"cpu": "x"}, "cost": _sample()}
        return 0, f"a table\n{json.dumps(report)}\n"

    report = run_all(
        tmp_path / "out",
        Console(quiet=True),
        history_file=str(tmp_path / "history.jsonl"),
        run=run,
    )
    states = results(report["outcomes"])
    assert states["breakdown"] == "timed out" and states["interior"] == "missing"
    assert states["sweep"] == states["memory"] == "failed"
    assert states["buglocal"] == states["ttft"] == "ok"
    detail = {one["name"]: one["detail"] for one in report["outcomes"]}
    assert detail["sweep"] == "ValueError: wrong"
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ok = [name for name, state in states.items() if state == "ok"]
    assert [json.loads(line)["benchmark"] for line in lines] == ok
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == len(ok)
    scaling = next(arguments for arguments in asked if arguments[1] == "scaling")
    assert scaling[-2:] == ["--plot", str(tmp_path / "out" / "scaling.png")]


def _sample() -> dict[str, float]:
    return {"median_ms": 1.0, "min_ms": 1.0, "max_ms": 1.0}


def test_the_quick_form_runs_what_has_one_and_remembers_nothing(tmp_path) -> None:
    def run(arguments, log, seconds):
        assert seconds <= 90
        return 0, json.dumps({"benchmark": arguments[1], "machine": {}, "cost": _sample()})

    file = tmp_path / "history.jsonl"
    report = run_all(tmp_path, Console(quiet=True), quick=True, history_file=str(file), run=run)
    states = results(report["outcomes"])
    assert states["serve"] == "skipped" and states["ttft"] == "ok"
    assert not file.exists()
    with pytest.raises(ConfigError, match="only='nonsense' is unknown"):
        run_all(tmp_path, Console(quiet=True), only=["nonsense"], run=run)
    chosen = run_all(tmp_path, Console(quiet=True), only=["traffic"], quick=True, run=run)
    assert results(chosen["outcomes"]) == {"traffic": "ok"}


def test_nothing_begins_when_the_time_is_over(tmp_path, monkeypatch) -> None:
    given = []

    def run(arguments, log, seconds):
        given.append(seconds)
        return 0, json.dumps({"benchmark": arguments[1]})

    monkeypatch.setattr(full, "QUICK_SECONDS", 20)
    monkeypatch.setattr(full, "monotonic", iter(range(0, 1000, 4)).__next__)
    report = run_all(tmp_path, Console(quiet=True), quick=True, run=run)
    assert given == [16, 12]  # what is left, as it is less than they may take
    states = results(report["outcomes"])
    assert states["traffic"] == states["scaling"] == "left out" and states["serve"] == "skipped"


def outcome(name: str, **report: object) -> Outcome:
    return Outcome(name, "ok", 1.0, 10, "", {"benchmark": name, **report})


def goal(text: str, met: bool | None) -> dict[str, object]:
    return {"text": text, "met": met, "figure": f"{text}!"}


def test_goals_are_met_not_met_or_not_run() -> None:
    said = [goal("fast", True), goal("flat", False), goal("peers", None)]
    judged = judge([outcome("ttft", goals=said), outcome("buglocal")])
    states = [(one.goal, one.state, one.figure) for one in judged]
    assert states == [
        ("fast", "met", "fast!"),
        ("flat", "not met", "flat!"),
        ("peers", "not run", "peers!"),
        (*GOALS["interior"], "not run", ""),
        (*GOALS["buglocal"], "not run", ""),  # it ran, and could not say
    ]
    assert all(one.state == "not run" for one in judge([]))
    assert len(judge([])) == sum(map(len, GOALS.values())) == 5


def test_tables_say_what_happened(capsys) -> None:
    console = Console(width=100)
    console.print(full.outcome_table([Outcome("ttft", "failed", 3.0, 10, "why")]))
    console.print(full.goal_table(judge([outcome("ttft", goals=[goal("fast", True)])])))
    shown = capsys.readouterr().out
    for part in ("failed", "why", "3 s", "fast!", "met", "not run"):
        assert part in shown


def test_a_process_that_takes_too_long_is_ended(tmp_path, monkeypatch) -> None:
    slow = tmp_path / "kvboost.py"
    slow.write_text(
        "import sys, time\nprint('begun', flush=True)\ntime.sleep(float(sys.argv[1]))\n"
    )

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, printed = run_process(["60"], tmp_path / "log", 2.0)
    assert status is None and printed == "begun\n"
    status, _ = run_process(["0"], tmp_path / "log", 30.0)
    assert status == 0 and (tmp_path / "log").read_text() == "begun\n"
