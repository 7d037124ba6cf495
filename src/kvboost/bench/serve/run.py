"""``kvboost bench serve``: servers under load, one at a time, with the very same requests.

The comparison is fair by construction. Every server has the same threads, context and room for KV.
All requests are chat completions with equal bodies, so each server applies the model's own
template. Special tokens are ruled out (``logit_bias``), so every answer has ``max_tokens`` tokens
and all of its text comes back with the next turn. In every round each server starts anew, is warmed
by the same traffic, is loaded and stopped; the order rotates, and the requests are new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from kvboost.bench.kit.benchmark import ROUNDS, Bench, Report, duration, option
from kvboost.bench.kit.benchmark import Settings as Base
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import BASELINE, CONNECTOR, OURS, PREFIX, SYSTEMS
from kvboost.bench.peers.setting import Setting, Vocabulary, prepare
from kvboost.bench.serve import report
from kvboost.bench.serve.clients import Answer, Target
from kvboost.bench.serve.costs import watched
from kvboost.bench.serve.processes import Clients
from kvboost.bench.serve.stats import Round, Row, goals
from kvboost.bench.serve.users import WORKLOADS, Workload, make_workload
from kvboost.bench.texts.prompts import passages
from kvboost.bench.texts.questions import read_passages
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import KVBoostError
from kvboost.progress import Progress, Step

DEVICE = "Where servers run; on a GPU ours do, and vLLM with --vllm."
PYTHON_OF_VLLM = "A Python that has vLLM, instead of the one for CPUs of make peers."
START_SECONDS = 20
"""About what a server takes to start."""


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    QUICK: ClassVar = {
        "systems": (OURS, BASELINE),
        "workloads": ("rag",),
        "users": (4,),
        "requests": 2,
        "max_tokens": 16,
        "rounds": 1,
    }

    model: str = option(DEFAULT_MODEL, "A bundled name or a folder.")
    device: str = option("cpu", DEVICE, choices=("cpu", "cuda"))
    vllm: str | None = option(None, PYTHON_OF_VLLM)
    systems: tuple[str, ...] = option(
        tuple(name for name in SYSTEMS if name not in (CONNECTOR, PREFIX)),
        "Server to measure.",
        "system",
        choices=tuple(SYSTEMS),
    )
    workloads: tuple[str, ...] = option(
        ("rag", "chat"), "What users send.", "load", choices=tuple(WORKLOADS)
    )
    users: tuple[int, ...] = option(
        (8,), "Users at once; several numbers, one after the other.", "users", least=1
    )
    requests: int = option(4, "Requests of each user.", least=1)
    max_tokens: int = option(32, "Tokens of every answer.", least=1)
    data: str | None = option(
        None,
        "A file with passages to send, as kvboost quality takes; Python's own text without it.",
    )
    rounds: int = option(3, ROUNDS, least=1, most=50)
    seed: int = option(0, "Decides what users send, and when.")
    seconds: float = option(
        120.0, "Time of one load; nothing is sent later, so slow servers end.", least=0.001
    )


def run(settings: Settings, bench: Bench) -> Report:
    setting, vocabulary = prepare(
        settings.model,
        max(settings.users),
        device=torch.device(settings.device),
        vllm=settings.vllm,
    )
    bench.describe(setting.device, setting.dtype, threads=setting.threads)
    present, missing = find_systems(settings.systems, setting, bench)
    loads = len(settings.workloads) * len(settings.users)
    each = START_SECONDS + 2 * settings.seconds * loads  # its warm-up takes no longer
    most = settings.rounds * len(present) * each
    bench.say(f"at most about {duration(most)}; change it with --seconds, --rounds or --load")
    comparison = Comparison(settings, setting, vocabulary, present)
    with Progress("servers under load, one at a time") as progress:
        comparison.run(progress)
    rows = comparison.rows()
    return Report(
        {
            "systems": describe_systems(present, setting, comparison.started_s),
            "missing": missing,
            "failures": comparison.failures,
            "errors": comparison.errors,
            "rows": [row.as_json(rows) for row in rows],
        },
        [
            *report.tables(rows),
            report.NOTE,
            *report.notes(rows, settings.requests),
            *report.problems(comparison.errors, comparison.failures),
        ],
        goals(rows),
        draw=partial(report.serve_figure, rows),
    )


def find_systems(
    names: Sequence[str], setting: Setting, bench: Bench
) -> tuple[list[str], dict[str, str]]:
    """The systems that can run here, and why others cannot. Raises if there are none."""
    found = {name: SYSTEMS[name].missing(setting) for name in names}
    missing = {name: reason for name, reason in found.items() if reason is not None}
    for name, reason in missing.items():
        bench.say(f"{name} is missing: {reason}", style="yellow")
    if len(missing) == len(found):
        raise KVBoostError("none of the chosen systems is here to be measured")
    return [name for name in names if name not in missing], missing


def describe_systems(
    names: Sequence[str], setting: Setting, started_s: Mapping[str, float]
) -> dict[str, object]:
    """For the record."""
    return {
        name: {
            "version": SYSTEMS[name].version(setting),
            "started_s": started_s.get(name),
            **SYSTEMS[name].settings(setting),
        }
        for name in names
    }


class Comparison:
    """The rounds of a run, and what they gave."""

    def __init__(
        self, settings: Settings, setting: Setting, vocabulary: Vocabulary, present: Sequence[str]
    ) -> None:
        self.failures: dict[str, str] = {}
        """Why a system was given up, by its name."""
        self.errors: dict[str, str] = {}
        """The first error of a load in which some requests failed."""
        self.started_s: dict[str, float] = {}
        """The time that a system took to be ready, the last time."""
        self._settings = settings
        self._setting = setting
        self._bias = {str(number): -100 for number in vocabulary.special_ids}
        self._present = present
        self._measured: dict[tuple[str, str, int], list[Round]] = {}
        found = passages() if settings.data is None else read_passages(settings.data)
        self._traffic = [
            [
                make_workload(
                    name,
                    found,
                    vocabulary.count,
                    users=users,
                    requests=settings.requests,
                    seed=settings.seed + number,
                )
                for name in settings.workloads
                for users in settings.users
            ]
            for number in range(settings.rounds)
        ]

    def run(self, progress: Progress) -> None:
        """Every round. A system that fails is given up; the others go on."""
        with Clients() as clients:
            for number, traffic in enumerate(self._traffic, start=1):
                for name in rotated(self._present, number - 1):
                    if name in self.failures:
                        continue
                    total = sum(workload.num_requests for workload in traffic)
                    with (
                        progress.step(f"round {number}: {name}", total) as step,
                        given_up(self.failures, name),
                        running(SYSTEMS[name], self._setting) as there,
                    ):
                        self._load(name, there, clients, traffic, step)

    def rows(self) -> list[Row]:
        """Workload by workload, in the order of the settings."""
        asked = self._settings
        return [
            Row.of(system, workload, users, self._measured[system, workload, users])
            for workload in asked.workloads
            for users in asked.users
            for system in asked.systems
            if (system, workload, users) in self._measured
        ]

    def _load(
        self, name: str, there: Running, clients: Clients, traffic: Sequence[Workload], step: Step
    ) -> None:
        """All workloads of one round on one server."""
        self.started_s[name] = there.started_s
        asked = self._settings
        target = Target(there.url, there.model, asked.max_tokens, self._bias, seconds=asked.seconds)
        for workload in traffic:
            _check(name, clients.load(target, workload.warmup))
            with watched(there, self._setting.device) as costs:
                answers = clients.load(target, workload.users, step.advance)
            _check(name, answers)
            if error := next((answer.error for answer in answers if answer.error), None):
                self.errors.setdefault(f"{name}, {workload.name}", error)
            load = (name, workload.name, len(workload.users))
            self._measured.setdefault(load, []).append(Round.of(answers, costs))


@contextmanager
def given_up(failures: dict[str, str], name: str) -> Iterator[None]:
    """A failure in the block is noted, and ends the part of the system ``name``."""
    try:
        yield
    except KVBoostError as error:
        failures[name] = str(error)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names in the same order, with another one first."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def _check(name: str, answers: Sequence[Answer]) -> None:
    """Raises if no request at all was answered."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if len(errors) == len(answers):
        raise KVBoostError(f"{name} answered none of {len(answers)} requests: {errors[0]}")
