"""``python -m benchmarks all``: the main benchmarks one after the other, unattended, and the goals.

Each runs in a process of its own with a time limit, so that one that fails or hangs does not stop
the rest. The whole run ends in time as well: a benchmark that cannot start by then is left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.entries import BENCHMARKS
from kvboost.bench.kit.benchmark import duration
from kvboost.bench.kit.figures import check_plot
from kvboost.bench.kit.goals import Goal, show_goals
from kvboost.bench.kit.machine import here
from kvboost.bench.kit.record import append, record
from kvboost.bench.kit.tables import table
from kvboost.config import one_of
from kvboost.errors import ConfigError
from kvboost.progress import Progress

FULL_SECONDS = 89 * 60
QUICK_SECONDS = 175
SLACK = 1.5
"""A benchmark that takes this many times as long as expected is ended."""
LEAST_SECONDS = 5
GRACE_SECONDS = 4
WIDTH = "120"
"""Columns of what benchmarks print, which goes to a file."""


@dataclass(frozen=True)
class Job:
    """A benchmark of the whole run."""

    name: str
    arguments: str
    seconds: int
    """The expected seconds on two cores with AMX."""
    quick: str | None = None
    """Its arguments in the short form; None if none is short enough."""
    quick_seconds: int = 0


JOBS = (
    Job("ttft", "--peers --rounds 5", 1900, "--quick", 60),
    Job("quality", "--limit 10", 300, "--quick", 50),
    Job("serve", "--rounds 1 --requests 3 --seconds 90", 600),
    Job("agent", "--rounds 1", 600),
)


@dataclass(frozen=True)
class Outcome:
    name: str
    state: str
    """ok, failed, timed out, left out (no time), skipped"""
    seconds: float
    limit: int
    detail: str = ""
    report: dict[str, Any] | None = field(default=None, repr=False)


Run = Callable[[Sequence[str], Path, float], tuple[int | None, str]]
"""``run(arguments, log, seconds)``: exit status (None: out of time) and what was printed."""


def jobs(*, only: Sequence[str] = ()) -> list[Job]:
    """The benchmarks of a run. ``only`` names some of them."""
    for name in only:
        one_of(name, tuple(job.name for job in JOBS), "only")
    return [job for job in JOBS if not only or job.name in only]


def run_process(arguments: Sequence[str], log: Path, seconds: float) -> tuple[int | None, str]:
    """``python -m benchmarks`` with these arguments, in a process of its own. What it prints also
    goes to ``log``. Out of time, it is ended with all processes it has started."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
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
        except BaseException:  # the user interrupts
            os.killpg(process.pid, signal.SIGKILL)
            raise
    with log.open("a") as file:
        file.write(printed)
    return status, printed


def run_job(job: Job, folder: Path, *, quick: bool, plots: bool, left: float, run: Run) -> Outcome:
    """``left`` is what is left of the whole run's time."""
    limit, given = (job.quick_seconds, job.quick) if quick else (job.seconds, job.arguments)
    if given is None:
        return Outcome(job.name, "skipped", 0.0, 0, "has no quick form")
    if left < LEAST_SECONDS:
        return Outcome(job.name, "left out", 0.0, limit, "the time was over")
    arguments = [job.name, *given.split()]
    if plots and BENCHMARKS[job.name].plots:
        arguments += ["--plot", str(folder / f"{job.name}.png")]
    log = folder / f"{job.name}.log"
    start = perf_counter()
    status, printed = run(arguments, log, min(SLACK * limit, left))
    seconds = perf_counter() - start
    if status is None:
        return Outcome(job.name, "timed out", seconds, limit, f"see {log}")
    if status:
        said = log.read_text() if log.is_file() else ""
        lines = [line for line in said.splitlines() if any(map(str.isalnum, line))]
        return Outcome(job.name, "failed", seconds, limit, (lines or ["no message"])[-1][:120])
    try:
        report = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        return Outcome(job.name, "failed", seconds, limit, "its last line is not JSON")
    return Outcome(job.name, "ok", seconds, limit, "", report)


def judge(outcomes: Sequence[Outcome]) -> list[Goal]:
    """The goals of these benchmarks: as their reports say, or not run."""
    judged = []
    for one in outcomes:
        said = {goal["text"]: goal for goal in (one.report or {}).get("goals", ())}
        missing = {"met": None, "figure": "not run"}
        texts = BENCHMARKS[one.name].goals
        judged += [Goal(**said.get(text, {"text": text, **missing})) for text in texts]
    return judged


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    total = sum(one.seconds for one in outcomes), sum(one.limit for one in outcomes)
    rows = [
        (one.name, one.state, one.detail, f"{one.seconds:.0f} s", f"{one.limit} s")
        for one in (*outcomes, Outcome("all", "", *total))
    ]
    return table("benchmarks", ("benchmark", "state", ""), ("took", "expected"), rows)


def run_all(
    folder: Path,
    console: Console,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    minutes: float | None = None,
    run: Run = run_process,
) -> dict[str, Any]:
    """Runs all benchmarks (or ``only`` some), writes what they found into ``folder``, sums up.
    Takes at most ``minutes``: 89, or 3 in the quick form."""
    chosen = jobs(only=only)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={str(folder)!r} cannot be made ({error.strerror})") from error
    plots = _can_plot(folder, console)
    outcomes: list[Outcome] = []
    results = folder / "results.jsonl"
    results.write_text("")
    expected = sum(job.quick_seconds if quick else job.seconds for job in chosen)
    most = minutes * 60 if minutes else QUICK_SECONDS if quick else FULL_SECONDS
    told = f"{len(chosen)} benchmarks, about {duration(expected)} on two cores with AMX"
    end = monotonic() + most
    with (
        Progress(f"{told}; at most {duration(most)} (--minutes)") as progress,
        progress.step("benchmarks", len(chosen)) as step,
    ):
        for job in chosen:
            left = end - monotonic()
            outcome = run_job(job, folder, quick=quick, plots=plots, left=left, run=run)
            outcomes.append(outcome)
            console.print(f"{job.name}: {outcome.state}, {outcome.seconds:.0f} s", highlight=False)
            if outcome.report is not None:
                append(results, outcome.report)
            step.advance()
    goals = judge(outcomes)
    console.print(outcome_table(outcomes))
    show_goals(console, goals)
    console.print(f"results, logs and plots are in {folder}", highlight=False)
    figures = {
        "quick": quick,
        "folder": str(folder),
        "outcomes": [{**asdict(one), "report": None} for one in outcomes],
    }
    return record("all", {}, here(), figures, goals)


def _can_plot(folder: Path, console: Console) -> bool:
    try:
        check_plot(folder / "any.png")
    except ConfigError as error:
        console.print(f"no plots: {error}", highlight=False)
        return False
    return True
