"""A whole run of ``kvboost bench interior``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
from rich.console import Console

from kvboost.bench.goals import show_goals
from kvboost.bench.interior import report
from kvboost.bench.interior.measure import (
    AT_TOKENS,
    PEER_SECONDS,
    against_best,
    goal,
    measure_interior,
)
from kvboost.bench.interior.plot import plot_interior
from kvboost.bench.interior.prompts import DOCUMENTS, make_round
from kvboost.bench.machine import describe
from kvboost.bench.peers.crew import Crew
from kvboost.bench.peers.engines import ENGINES
from kvboost.bench.peers.report import crew_json, show_crew
from kvboost.bench.peers.setting import prepare
from kvboost.bench.plots import check_plot
from kvboost.bench.workloads import Unread
from kvboost.config import at_least, one_of, whole
from kvboost.errors import ConfigError, KVBoostError
from kvboost.model.device import pick_device, pick_dtype
from kvboost.progress import Progress

BESIDE = 200
"""Tokens of a prompt that are not documents: openings, other text, the question."""


@dataclass(frozen=True)
class Plan:
    """What is measured. Validated on creation."""

    model: str
    engines: tuple[str, ...] = tuple(ENGINES)
    tokens: int = AT_TOKENS
    """Of a prompt, about."""
    rounds: int = 5
    peer_seconds: float = PEER_SECONDS

    def __post_init__(self) -> None:
        for engine in self.engines:
            one_of(engine, tuple(ENGINES), "peer")
        whole(self.tokens, BESIDE + 64 * DOCUMENTS, "tokens")
        whole(self.rounds, 1, "rounds")
        at_least(self.peer_seconds, 1.0, "peer_seconds")

    @property
    def document_tokens(self) -> int:
        return (self.tokens - BESIDE) // DOCUMENTS


def run_interior(
    plan: Plan,
    console: Console,
    *,
    plot: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Every engine that is there, on documents at every place."""
    if plot is not None:
        check_plot(plot)
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    setting, vocabulary = prepare(
        plan.model,
        threads=torch.get_num_threads(),
        device=str(place),
        dtype=str(kind).removeprefix("torch."),
    )
    if plan.tokens + BESIDE > setting.context_length:
        raise ConfigError(
            f"tokens={plan.tokens} does not fit the model's context of "
            f"{setting.context_length:,} with {BESIDE} to spare; choose fewer"
        )
    machine = describe(place, kind)
    console.print(machine)
    unread = Unread(vocabulary.encode)
    rounds = [
        make_round(vocabulary.encode, unread, number, plan.document_tokens)
        for number in range(plan.rounds + 1)
    ]
    chosen = [ENGINES[name] for name in plan.engines]
    with (
        Crew(chosen, setting, vocabulary.decode) as crew,
        Progress("documents at other places, engines in turns") as progress,
    ):
        crew.start(progress)
        with progress.step("rounds", len(rounds)) as step:
            rows = measure_interior(
                crew, rounds, most_seconds=plan.peer_seconds, on_round=step.advance
            )
    show_crew(console, crew)
    if not rows:
        raise KVBoostError("none of the chosen engines could be measured")
    best = against_best(rows)
    report.show(console, rows, best, plan.rounds)
    reached = goal(best, plan.tokens)
    show_goals(console, [reached])
    if plot is not None:
        cpu = machine.get("gpu", machine["cpu"])
        plot_interior(rows, plot, title=f"{plan.model}, documents known, {cpu}")
        console.print(f"drawn in {plot}", highlight=False)
    return {
        "benchmark": "interior",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "plan": asdict(plan),
        **crew_json(crew),
        "rows": [row.as_json() for row in rows],
        "against_best": {
            where: {"peer": name, "times_ours": ratio} for where, (name, ratio) in best.items()
        },
        "goals": [asdict(reached)],
    }
