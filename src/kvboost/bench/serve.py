"""Servers under load, one at a time on the same machine, with the very same requests.

Fair by construction: every server has the same threads, context and room for KV; all requests are
chat completions whose bodies are alike, so each server applies the model's own template; special
tokens are ruled out (``logit_bias``), so every answer has ``max_tokens`` tokens and all of its text
comes back with the next turn. In every round each server starts anew, is warmed by the same
traffic, is loaded and stopped; who comes first rotates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console

from kvboost.bench import serve_report
from kvboost.bench.goals import show_goals
from kvboost.bench.machine import describe
from kvboost.bench.peers.base import Peer, Setting
from kvboost.bench.peers.cpu import watch_cpu
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.setting import Vocabulary, prepare
from kvboost.bench.peers.systems import OURS, SYSTEMS
from kvboost.bench.plots import check_plot
from kvboost.bench.serve_load import Answer, Server, closed_loop, open_loop
from kvboost.bench.serve_plot import plot_serve
from kvboost.bench.serve_stats import RIVAL, Round, Row, goals
from kvboost.bench.serve_work import WORKLOADS, Workload, make_workload
from kvboost.config import at_least, one_of, whole
from kvboost.errors import ConfigError, KVBoostError
from kvboost.progress import Progress, Step

LOOPS = ("closed", "open", "both")


@dataclass(frozen=True)
class Plan:
    """What is measured. Validated on creation."""

    model: str
    systems: tuple[str, ...] = tuple(SYSTEMS)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    users: int = 8
    requests: int = 4
    """Of each user."""
    max_tokens: int = 32
    rounds: int = 3
    loop: str = "closed"
    rate: float | None = None
    """Open loop: requests per second."""
    load: float = 0.7
    """Open loop without a rate: this share of what the rival reached in the closed loop."""
    seed: int = 0
    seconds: float = 120.0
    """Of one load: nothing is sent later, so that a slow system ends too."""

    def __post_init__(self) -> None:
        for system in self.systems:
            one_of(system, tuple(SYSTEMS), "system")
        for workload in self.workloads:
            one_of(workload, tuple(WORKLOADS), "workload")
        one_of(self.loop, LOOPS, "loop")
        for option in ("users", "requests", "max_tokens", "rounds"):
            whole(getattr(self, option), 1, option)
        for option in ("rate", "load", "seconds"):
            if getattr(self, option) is not None:
                at_least(getattr(self, option), 0.001, option)

    @property
    def loops(self) -> tuple[str, ...]:
        """What is run, in order: a share of a rate takes the rate first."""
        if self.loop == "open" and self.rate is not None:
            return ("open",)
        return ("closed",) if self.loop == "closed" else ("closed", "open")


def run_serve(
    plan: Plan, console: Console, *, plot: str | None = None, save: str | None = None
) -> dict[str, object]:
    """The whole comparison; also saved in the file ``save``."""
    for path in (plot, save):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path!r}: there is no folder {Path(path).absolute().parent}")
    if plot is not None:
        check_plot(plot)
    setting, vocabulary = prepare(plan.model, plan.users)
    machine: dict[str, object] = {
        **describe(torch.device("cpu"), torch.bfloat16),
        "threads": setting.threads,
    }
    console.print(machine)
    missing = {name: SYSTEMS[name].missing(setting) for name in plan.systems}
    present = [name for name in plan.systems if missing[name] is None]
    for name, reason in missing.items():
        if reason is not None:
            console.print(f"{name} is missing: {reason}", style="yellow", highlight=False)
    if not present:
        raise KVBoostError("none of the chosen systems is here to be measured")
    comparison = Comparison(plan, setting, vocabulary, present)
    with Progress("servers under load, one at a time") as progress:
        for loop in plan.loops:
            comparison.run(loop, progress)
    rows = comparison.rows()
    serve_report.show(console, rows, plan.users, planned=plan.users * plan.requests)
    serve_report.show_problems(console, comparison.errors, comparison.failures)
    show_goals(console, goals(rows))
    if plot is not None and rows:
        plot_serve(rows, plot, title=f"{plan.model}, {plan.users} users, {machine['cpu']}")
        console.print(f"drawn in {plot}", highlight=False)
    report: dict[str, object] = {
        "benchmark": "serve",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "plan": asdict(plan),
        "systems": {
            name: {
                "version": SYSTEMS[name].version(),
                "started_s": comparison.started_s.get(name),
                **SYSTEMS[name].settings(setting),
            }
            for name in present
        },
        "missing": {name: reason for name, reason in missing.items() if reason is not None},
        "failures": comparison.failures,
        "errors": comparison.errors,
        "rows": [row.as_json() for row in rows],
        "goals": [asdict(goal) for goal in goals(rows)],
    }
    if save is not None:
        Path(save).write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"saved in {save}", highlight=False)
    return report


class Comparison:
    """The rounds of a run, and what they gave."""

    def __init__(
        self, plan: Plan, setting: Setting, vocabulary: Vocabulary, present: Sequence[str]
    ) -> None:
        self.failures: dict[str, str] = {}
        """Why a system was given up, by its name."""
        self.errors: dict[str, str] = {}
        """The first error of a load in which some requests failed."""
        self.started_s: dict[str, float] = {}
        """How long a system took to be ready, the last time."""
        self._plan = plan
        self._setting = setting
        self._bias = {str(number): -100 for number in vocabulary.special_ids}
        self._present = present
        self._measured: dict[tuple[str, str, str], list[Round]] = {}
        self._traffic = [
            [
                make_workload(
                    name,
                    vocabulary.count,
                    users=plan.users,
                    requests=plan.requests,
                    seed=plan.seed + number,
                )
                for name in plan.workloads
            ]
            for number in range(plan.rounds)
        ]

    def run(self, loop: str, progress: Progress) -> None:
        """Every round of ``loop``. A system that fails is given up; the others go on."""
        rates = {name: self._rate(name) for name in self._plan.workloads} if loop == "open" else {}
        for number, traffic in enumerate(self._traffic):
            for name in rotated(self._present, number):
                if name in self.failures:
                    continue
                total = sum(workload.num_requests for workload in traffic)
                with progress.step(f"{loop} loop, round {number + 1}: {name}", total) as step:
                    try:
                        with running(SYSTEMS[name], self._setting) as there:
                            self._load(SYSTEMS[name], there, loop, number, rates, step)
                    except KVBoostError as error:
                        self.failures[name] = str(error)

    def rows(self) -> list[Row]:
        """Workload by workload."""
        return [
            Row.of(system, workload, loop, self._rate(workload) if loop == "open" else None, rounds)
            for chosen in self._plan.workloads
            for (system, workload, loop), rounds in sorted(
                self._measured.items(), key=lambda item: (item[0][2], self._at(item[0][0]))
            )
            if workload == chosen
        ]

    def _load(
        self,
        peer: Peer,
        there: Running,
        loop: str,
        number: int,
        rates: dict[str, float],
        step: Step,
    ) -> None:
        """All workloads of one round on one server."""
        self.started_s[peer.name] = there.started_s
        server = Server(
            there.url,
            there.model,
            self._plan.max_tokens,
            self._bias,
            seconds=self._plan.seconds,
        )
        for workload in self._traffic[number]:
            _check(peer, asyncio.run(closed_loop(server, workload.warmup)))
            others = watch_cpu(there.pid)
            answers = asyncio.run(self._send(server, workload, loop, number, rates, step))
            others_share = others()
            _check(peer, answers)
            if error := next((answer.error for answer in answers if answer.error), None):
                self.errors.setdefault(f"{peer.name}, {workload.name}, {loop} loop", error)
            key = (peer.name, workload.name, loop)
            self._measured.setdefault(key, []).append(Round.of(answers, others_share))

    async def _send(
        self,
        server: Server,
        workload: Workload,
        loop: str,
        number: int,
        rates: dict[str, float],
        step: Step,
    ) -> list[Answer]:
        if loop == "closed":
            return await closed_loop(server, workload.users, step.advance)
        seed = self._plan.seed + number
        return await open_loop(server, workload.users, rates[workload.name], seed, step.advance)

    def _rate(self, workload: str) -> float:
        """Requests per second of the open loop, the same for every system."""
        if self._plan.rate is not None:
            return self._plan.rate
        for name in (RIVAL, OURS, *self._present):
            if rounds := self._measured.get((name, workload, "closed")):
                row = Row.of(name, workload, "closed", None, rounds)
                return self._plan.load * row.median.requests_per_s
        raise KVBoostError(f"no closed loop of {workload} gave a rate to take a share of")

    def _at(self, system: str) -> int:
        return self._plan.systems.index(system)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names in the same order, another one first."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def _check(peer: Peer, answers: Sequence[Answer]) -> None:
    """Raises if no request at all was answered."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if len(errors) == len(answers):
        raise KVBoostError(f"{peer.name} answered none of {len(answers)} requests: {errors[0]}")
