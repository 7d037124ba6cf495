"""Every benchmark one after the other, unattended, and what came of the goals.

Each runs in a process of its own with a limit of time, so that one that fails or hangs costs itself
and not the rest. A whole run ends before 90 minutes are over, or three in the quick form: what does
not begin by then is said to be left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from kvboost.bench import history
from kvboost.bench.plots import check_plot
from kvboost.bench.record import here, record
from kvboost.errors import ConfigError
from kvboost.progress import Progress

FULL_SECONDS = 89 * 60
QUICK_SECONDS = 175
SLACK = 1.5
"""So many times what it should take, and a benchmark is ended."""
LEAST_SECONDS = 5
GRACE_SECONDS = 4
WIDTH = "120"
"""Columns of what they print, which goes to a file."""


@dataclass(frozen=True)
class Job:
    """One benchmark: its arguments and the seconds it should take, in both forms. ``quick`` is None
    where there is no form short enough to go with the others."""

    name: str
    full: tuple[str, ...]
    seconds: int
    quick: tuple[str, ...] | None = None
    quick_seconds: int = 0
    plots: bool = False
    note: str = ""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What each should take on two cores, in seconds: full, quick. A test adds them up.
JOBS = (
    Job("ttft", _words("--peers --rounds 5"), 1400, _words("--quick"), 60, plots=True),
    Job("interior", _words("--rounds 4"), 720, _words("--quick"), 45, plots=True),
    Job("serve", _words("--rounds 1 --workload rag --workload chat"), 600, plots=True),
    Job("breakdown", (), 120, _words("--quick --tokens 512"), 12, plots=True),
    Job("scaling", (), 120, _words("--quick --requests 1"), 14, plots=True),
    Job("memory", (), 120, _words("--quick"), 12, plots=True),
    Job("batch", _words("--rounds 3"), 180),
    Job("traffic", (), 60, _words("--requests 300"), 8, plots=True),
    Job("moved", (), 120),
    Job("arrange", _words("--requests 60"), 45),
    Job("bits", _words("--limit 12"), 150),
    Job("tiers", (), 45),
    Job("restart", (), 60),
    Job("sweep", _words("--limit 8"), 560, plots=True),
    Job("quality", _words("--limit 12"), 300, plots=True),
    Job(
        "buglocal",
        _words("--model smollm2-135m --questions 4"),
        120,
        _words("--quick"),
        15,
        plots=True,
        note="the embedded model and a few questions: it shows that it runs. The figure to quote "
        "takes a GPU: kvboost bench buglocal --device cuda",
    ),
)


GOALS = {
    "ttft": (
        "exact hits at 2,048 tokens at least 8 × faster to first token than stock transformers",
        "exact hits at 2,048 tokens faster than every peer's warm prefix",
        "chat turn 8 takes at most 1.3 × as long as turn 2",
    ),
    "interior": ("interior and reordered reuse at least 3 × faster than the best peer",),
    "buglocal": ("which function has the bug: within one point of the baseline",),
}
"""What is wanted, by the benchmark that says whether it is so; shown where that was not run."""


@dataclass(frozen=True)
class Judged:
    goal: str
    state: str
    """met, not met, not run (or too little of it was)"""
    figure: str = ""


@dataclass(frozen=True)
class Outcome:
    name: str
    state: str
    """ok, failed, timed out, left out (no time), missing (no such command), skipped"""
    seconds: float
    limit: int
    detail: str = ""
    report: dict[str, Any] | None = field(default=None, repr=False)


Run = Callable[[Sequence[str], Path, float], tuple[int | None, str]]
"""``run(arguments, log, seconds)``: exit status (None: out of time) and what was printed."""


def run_process(arguments: Sequence[str], log: Path, seconds: float) -> tuple[int | None, str]:
    """``kvboost`` with these arguments, in a process of its own. What it prints goes to ``log`` as
    well. Out of time, it is ended with all processes it has started."""
    command = [sys.executable, "-m", "kvboost", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": WIDTH},
        ) as process,
    ):
        try:
            printed, _ = process.communicate(timeout=seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                printed, _ = process.communicate(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
            status = None
        except BaseException:  # the user has had enough
            os.killpg(process.pid, signal.SIGKILL)
            raise
    with log.open("a") as file:
        file.write(printed)
    return status, printed


def run_job(job: Job, folder: Path, *, quick: bool, plots: bool, left: float, run: Run) -> Outcome:
    """``left`` is what is left of the whole run's time."""
    limit = job.quick_seconds if quick else job.seconds
    given = job.quick if quick else job.full
    if given is None:
        return Outcome(job.name, "skipped", 0.0, 0, "not in the quick form")
    if left < LEAST_SECONDS:
        return Outcome(job.name, "left out", 0.0, limit, "the time was over")
    arguments = ["bench", job.name, *given]
    if plots and job.plots:
        arguments += ["--plot", str(folder / f"{job.name}.png")]
    log = folder / f"{job.name}.log"
    start = perf_counter()
    status, printed = run(arguments, log, min(SLACK * limit, left))
    seconds = perf_counter() - start
    if status is None:
        return Outcome(job.name, "timed out", seconds, limit, f"see {log}")
    if status:
        said = log.read_text() if log.is_file() else ""
        if "No such command" in said:
            return Outcome(job.name, "missing", seconds, limit, "there is no such command yet")
        lines = [line for line in said.splitlines() if any(map(str.isalnum, line))]
        return Outcome(job.name, "failed", seconds, limit, (lines or ["it said nothing"])[-1][:120])
    try:
        report = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        return Outcome(job.name, "failed", seconds, limit, "its last line is no JSON")
    return Outcome(job.name, "ok", seconds, limit, job.note, report)


def judge(outcomes: Sequence[Outcome]) -> list[Judged]:
    """Every goal. A benchmark's report has its own ``goals``: a ``text``, whether it was ``met``
    (None: cannot be said), and the ``figure``."""
    reports = {one.name: one.report for one in outcomes if one.report is not None}
    judged = []
    for benchmark, texts in GOALS.items():
        said = reports.get(benchmark, {}).get("goals")
        if not said:
            judged += [Judged(text, "not run") for text in texts]
            continue
        states = {True: "met", False: "not met", None: "not run"}
        judged += [Judged(one["text"], states[one["met"]], one["figure"]) for one in said]
    return judged


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="benchmarks")
    for heading in ("benchmark", "state", "took", "expected", ""):
        table.add_column(heading, justify="right" if heading in ("took", "expected") else "left")
    for one in outcomes:
        took, limit = (f"{value:.0f} s" if value else "–" for value in (one.seconds, one.limit))
        style = None if one.state in ("ok", "skipped") else "red"
        table.add_row(one.name, one.state, took, limit, one.detail, style=style)
    total = sum(one.seconds for one in outcomes)
    table.add_row("all", "", f"{total:.0f} s", f"{sum(one.limit for one in outcomes)} s")
    return table


def goal_table(judged: Sequence[Judged]) -> Table:
    table = Table(title="goals")
    for heading in ("goal", "", "seen"):
        table.add_column(heading)
    for one in judged:
        colour = {"met": "green", "not met": "red"}.get(one.state)
        table.add_row(one.goal, one.state, one.figure, style=colour)
    return table


def run_all(
    folder: Path,
    console: Console,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    history_file: str | None = None,
    run: Run = run_process,
) -> dict[str, Any]:
    """Runs all benchmarks (or ``only`` some), writes what they found into ``folder``, sums up."""
    names = [job.name for job in JOBS]
    for name in only:
        if name not in names:
            raise ConfigError(f"only={name!r} is unknown; there are {', '.join(names)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={str(folder)!r} cannot be made ({error.strerror})") from error
    jobs = [job for job in JOBS if not only or job.name in only]
    plots = _can_plot(folder, console)
    outcomes: list[Outcome] = []
    results = folder / "results.jsonl"
    results.write_text("")
    expected = sum(job.quick_seconds if quick else job.seconds for job in jobs)
    end = monotonic() + (QUICK_SECONDS if quick else FULL_SECONDS)
    with (
        Progress(f"{len(jobs)} benchmarks, about {expected / 60:.0f} minutes") as progress,
        progress.step("benchmarks", len(jobs)) as step,
    ):
        for job in jobs:
            left = end - monotonic()
            outcome = run_job(job, folder, quick=quick, plots=plots, left=left, run=run)
            outcomes.append(outcome)
            console.print(f"{job.name}: {outcome.state}, {outcome.seconds:.0f} s", highlight=False)
            if outcome.report is not None:
                with results.open("a") as file:
                    file.write(json.dumps(outcome.report) + "\n")
                if history_file is not None and not quick:
                    _remember(outcome.report, history_file, console)
            step.advance()
    console.print(outcome_table(outcomes))
    judged = judge(outcomes)
    console.print(goal_table(judged))
    console.print(f"results, logs and plots are in {folder}", highlight=False)
    return record(
        "all",
        None,
        here(),
        quick=quick,
        folder=str(folder),
        outcomes=[{**asdict(one), "report": None} for one in outcomes],
        goals=[asdict(one) for one in judged],
    )


def _can_plot(folder: Path, console: Console) -> bool:
    try:
        check_plot(folder / "any.png")
    except ConfigError as error:
        console.print(f"no plots: {error}", highlight=False)
        return False
    return True


def _remember(report: Mapping[str, Any], path: str, console: Console) -> None:
    try:
        history.append(path, history.entry_of(report, measured_here=True))
    except ConfigError as error:
        console.print(f"{report['benchmark']} is not in the history: {error}", highlight=False)
