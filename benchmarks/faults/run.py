"""Faults: what is left when processes are killed, disks fill up or servers die.

Every kind of fault is tried a number of times, in a folder of its own. The report counts how often
it was tried and how often everything that must hold did hold; a failure says what was seen instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from rich.table import Table

from benchmarks.faults import calls, storage
from benchmarks.faults.case import Case, NotHere
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    """The number of times each fault is tried."""

    QUICK: ClassVar = {
        "kills": 10,
        "disks": 1,
        "redis_kills": 2,
        "forks": 2,
        "interrupts": 8,
        "requests": 60,
    }

    kills: int = option(50, "How often one of two writers is killed, or both.", least=1)
    disks: int = option(3, "How often a disk is full, and a folder read-only.", least=1)
    redis_kills: int = option(10, "How often Redis is killed.", least=1)
    forks: int = option(6, "How often a forked child uses the engine.", least=1)
    interrupts: int = option(40, "How often Ctrl-C interrupts an answer.", least=1)
    requests: int = option(300, "How many requests join, a third of which is cancelled.", least=1)


Faults = Callable[[Case, int, Path], None]


def run(settings: Settings, bench: Bench) -> Report:
    plan: list[tuple[str, Faults, int]] = [
        ("kill -9, two writers on one folder", storage.killed_writers, settings.kills),
        ("read-only folder", storage.read_only_folder, settings.disks),
        ("full disk", storage.full_disk, settings.disks),
        ("Redis killed during traffic", storage.killed_redis, settings.redis_kills),
        ("engine used in a forked child", calls.forked_child, settings.forks),
        ("Ctrl-C in generate", calls.interrupted, settings.interrupts),
        ("random joins and cancels", calls.joins_and_cancels, settings.requests),
    ]
    bench.describe(torch.device("cpu"), torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the small model gains nothing from more
    try:
        tried = [attempt(name, faults, times) for name, faults, times in plan]
    finally:
        torch.set_num_threads(threads)
    return Report(
        {
            "tried": sum(case.tried for case in tried),
            "failed": sum(len(case.failures) for case in tried),
            "cases": {case.name: case.as_json() for case in tried},
        },
        [_table(tried)],
        problems=[f"{case.name}: {failure}" for case in tried for failure in case.failures],
    )


def attempt(name: str, faults: Faults, times: int) -> Case:
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


def _table(cases: list[Case]) -> Table:
    table = Table("fault", title="faults", title_justify="left")
    for name in ("tried", "passed", "failed"):
        table.add_column(name, justify="right")
    table.add_column("what was seen")
    for case in cases:
        counts = (str(n) for n in (case.tried, case.passed, len(case.failures)))
        table.add_row(case.name, *counts, case.note)
    return table
