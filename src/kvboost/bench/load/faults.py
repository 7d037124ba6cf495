"""Faults: what happens when a process is killed, a disk fills up or a server dies.

Every kind of fault is tried a number of times, in a folder of its own. The report counts how often
it was tried and how often everything that must hold did hold; a failure says what was seen instead.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from kvboost.bench.load import fault_cases
from kvboost.bench.load.fault_cases import Case, NotHere, expect
from kvboost.bench.soak import soak
from kvboost.config import DEFAULT_MODEL, at_least, whole
from kvboost.model.load import load
from kvboost.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How often each fault is tried, and how long memory is watched."""

    kills: int = 50
    disks: int = 3
    redis_kills: int = 10
    forks: int = 6
    interrupts: int = 40
    requests: int = 300
    minutes: float = 60.0
    """Of mixed requests, while memory is watched."""
    model: str = DEFAULT_MODEL
    """It answers those requests; the other faults use a small random model."""

    def __post_init__(self) -> None:
        for name in ("kills", "disks", "redis_kills", "forks", "interrupts", "requests"):
            whole(getattr(self, name), 1, name)
        at_least(self.minutes, 0.0, "minutes")


QUICK: dict[str, Any] = {
    "kills": 10,
    "disks": 1,
    "redis_kills": 2,
    "forks": 2,
    "interrupts": 8,
    "requests": 60,
    "minutes": 0.5,
}
"""What ``--quick`` changes. It takes less than two minutes."""

Faults = Callable[[Case, int, Path], None]


def run_faults(settings: Settings, console: Console) -> dict[str, Any]:
    """Tries every fault, prints the counts and returns them."""
    plan: list[tuple[str, Faults, int]] = [
        ("kill -9, two writers on one folder", fault_cases.killed_writers, settings.kills),
        ("read-only folder", fault_cases.read_only_folder, settings.disks),
        ("full disk", fault_cases.full_disk, settings.disks),
        ("Redis killed during traffic", fault_cases.killed_redis, settings.redis_kills),
        ("engine used in a forked child", fault_cases.forked_child, settings.forks),
        ("Ctrl-C in generate", fault_cases.interrupted, settings.interrupts),
        ("random joins and cancels", fault_cases.joins_and_cancels, settings.requests),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the small model gains nothing from more
    try:
        cases = [_try(name, faults, times) for name, faults, times in plan]
    finally:
        torch.set_num_threads(threads)
    if settings.minutes:
        cases.append(_watch_memory(settings))
    console.print(_table(cases))
    for case in cases:
        for failure in case.failures:
            console.print(f"! {case.name}: {failure}", style="red", highlight=False, markup=False)
    return {
        "benchmark": "faults",
        "tried": sum(case.tried for case in cases),
        "failed": sum(len(case.failures) for case in cases),
        "cases": {case.name: case.as_json() for case in cases},
    }


def _try(name: str, faults: Faults, times: int) -> Case:
    """All attempts of one kind; what goes wrong between two attempts is a failure as well."""
    case = Case(name)
    with (
        tempfile.TemporaryDirectory(prefix="kvboost-faults-") as folder,
        Progress(f"{name}: {times} times") as progress,
        progress.step("attempts", times) as step,
    ):
        case.on_trial = step.advance
        try:
            faults(case, times, Path(folder) / "kv")
        except NotHere as missing:
            case.note = f"not tried: {missing}"
        except Exception as error:
            case.failures.append(f"{type(error).__name__}: {error}")
            case.tried += 1
    return case


def _watch_memory(settings: Settings) -> Case:
    """Mixed requests for minutes; resident memory must stay flat after the first tenth."""
    case = Case(f"memory over {settings.minutes:g} minutes of mixed requests")
    model = load(settings.model, device="cpu")
    seconds = settings.minutes * 60
    with (
        tempfile.TemporaryDirectory(prefix="kvboost-faults-") as folder,
        Progress(f"mixed requests for {settings.minutes:g} minutes") as progress,
        progress.step("seconds", seconds) as step,
        case.trial(),
    ):
        shown = 0.0

        def show(elapsed: float) -> None:
            nonlocal shown
            step.advance(elapsed - shown)
            shown = elapsed

        seen = soak(model, seconds, Path(folder), show)
        case.note = (
            f"{seen.requests:,} requests, {seen.checked} answers compared; resident memory "
            f"{seen.settled_mb:,.0f} MB after a tenth of the time, then at most "
            f"{seen.most_mb:,.0f} ({seen.growth:+.1%})"
        )
        expect(not seen.problems, "; ".join(seen.problems))
    return case


def _table(cases: list[Case]) -> Table:
    table = Table("fault", title="faults", title_justify="left")
    for name in ("tried", "passed", "failed"):
        table.add_column(name, justify="right")
    table.add_column("what was seen")
    for case in cases:
        counts = (str(n) for n in (case.tried, case.passed, len(case.failures)))
        table.add_row(case.name, *counts, case.note)
    return table


def main(quick: bool = False, minutes: float | None = None, model: str | None = None) -> None:
    settings = Settings(**(QUICK if quick else {}))
    if minutes is not None:
        settings = replace(settings, minutes=minutes)
    if model is not None:
        settings = replace(settings, model=model)
    start = time.monotonic()
    report = run_faults(settings, Console())
    report["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(report))
    if report["failed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
