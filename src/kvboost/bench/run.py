"""Whole benchmark runs: load, measure with a progress bar, show, and return what a script wants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from kvboost import ConfigError, KVBoost, StockModel
from kvboost.bench import report, traffic
from kvboost.bench.arranged import measure_arranged
from kvboost.bench.machine import describe
from kvboost.bench.moved import TURNS, measure_conversation, measure_moved
from kvboost.bench.plots import check_plot, plot_quality
from kvboost.bench.quality import (
    DONORS,
    Row,
    Setting,
    Summary,
    cells_of,
    load_rows,
    measure,
    noise_floor,
    pool,
    save_rows,
    summarize,
)
from kvboost.bench.questions import Question, choose_questions
from kvboost.bench.traffic_plot import plot_traffic
from kvboost.config import STRATEGIES, one_of, within
from kvboost.progress import Progress

ROUNDING = 1e-6
"""A KL below this is the order of additions and nothing else; it is drawn as zero."""


def run_moved(
    model: str,
    rounds: int,
    conversations: int,
    console: Console,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Passages in new orders against stock's full prefill, and conversations that go on."""
    engine = KVBoost.from_pretrained(model, device=device, dtype=dtype, reuse_moved="always")
    stock = StockModel.from_pretrained(model, device=device, dtype=dtype)
    machine = describe(engine.device, engine.dtype)
    console.print(machine)
    with engine, Progress("measuring, interleaved") as progress:
        with progress.step("passages in new orders", total=rounds + 1) as step:
            moved = measure_moved(engine, stock, rounds=rounds, on_round=step.advance)
        with progress.step("conversations", total=conversations * TURNS) as step:
            turns = measure_conversation(engine, conversations, on_turn=step.advance)
    console.print(report.moved_table(moved))
    console.print(report.turns_table(turns))
    return {
        "benchmark": "moved",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "machine": machine,
        "moved": moved.as_json(),
        "turns": [asdict(turn) for turn in turns],
    }


def run_arranged(
    model: str,
    requests: int,
    console: Console,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Exact reuse on a stream of requests, as they come and arranged."""
    with (
        KVBoost.from_pretrained(model, device=device, dtype=dtype) as engine,
        Progress("requests that draw 5 of 50 documents by a Zipf law") as progress,
        progress.step("requests", total=requests) as step,
    ):
        arranged = measure_arranged(engine, requests=requests, on_request=step.advance)
    console.print(
        f"exact hits, share of prompt tokens over {arranged.requests} requests: "
        f"{arranged.as_given:.1%} as given, {arranged.arranged:.1%} arranged"
    )
    return {"benchmark": "arrange", "model": model, **asdict(arranged)}


def run_quality(
    model: str,
    datasets: Sequence[str],
    strategies: Sequence[str],
    ratios: Sequence[float],
    donors: Sequence[str],
    setting: Setting,
    console: Console,
    *,
    limit: int | None = None,
    part: str = "1/1",
    floor: bool = False,
    plot: str | None = None,
    save: str | None = None,
    load: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Quality of every strategy, ratio and donor kind, measured or loaded."""
    for strategy in strategies:
        one_of(strategy, STRATEGIES, "strategy")
    for ratio in ratios:
        within(ratio, 0.0, 1.0, "ratio")
    for donor in donors:
        one_of(donor, list(DONORS), "donor")
    if plot is not None:
        check_plot(plot)
    if save is not None and not Path(save).absolute().parent.is_dir():
        raise ConfigError(f"save={save!r}: there is no folder {Path(save).absolute().parent}")
    noise: dict[str, Any] | None = None
    machine: Any = "as saved"
    if load:
        rows = load_rows(load)
    else:
        questions = choose_questions(datasets, limit, part)
        with KVBoost.from_pretrained(
            model, device=device, dtype=dtype, reuse_moved="always"
        ) as engine:
            machine = describe(engine.device, engine.dtype)
            console.print(machine)
            rows = _measure(engine, questions, strategies, ratios, donors, setting)
            if floor:
                noise = _noise_floor(engine, model, questions, setting, device)
    if save is not None:
        save_rows(rows, save)
    summaries = summarize(rows)
    report.explain_quality(console)
    for table in report.quality_tables(summaries):
        console.print("", table)
    if noise is not None:
        console.print(
            f"noise floor, the same model in {noise['dtype']}: mean KL {noise['mean_kl']:.4f}, "
            f"median {noise['median_kl']:.4f}, same text {noise['same_text']:.0%}"
        )
    if plot is not None:
        level = noise["mean_kl"] if noise is not None else None
        title = f"{model}: deviation from full prefill"
        plot_quality(_panels(summaries), plot, title=title, floor=level)
        console.print(f"drawn in {plot}", highlight=False)
    return {
        "benchmark": "quality",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "machine": machine,
        "noise_floor": noise,
        "summaries": [asdict(one) for one in summaries],
        "pooled": [
            {"strategy": strategy, "ratio": ratio, "mean_kl": mean_kl}
            for (strategy, ratio), mean_kl in pool(summaries, ("alone", "header", "other")).items()
        ],
    }


def _measure(
    engine: KVBoost,
    questions: Sequence[Question],
    strategies: Sequence[str],
    ratios: Sequence[float],
    donors: Sequence[str],
    setting: Setting,
) -> list[Row]:
    total = len(questions) * len(donors) * len(list(cells_of(strategies, ratios)))
    with (
        Progress(f"{len(questions)} questions, {len(donors)} donor kinds") as progress,
        progress.step("served", total) as step,
    ):
        return list(measure(engine, questions, strategies, ratios, donors, setting, step.advance))


def _noise_floor(
    engine: KVBoost, model: str, questions: Sequence[Question], setting: Setting, device: str | None
) -> dict[str, Any]:
    other = "bfloat16" if str(engine.dtype) == "torch.float32" else "float32"
    with KVBoost.from_pretrained(model, device=device, dtype=other) as twin:
        return {"dtype": other, **noise_floor(engine, twin, questions, setting)}


def _panels(summaries: Sequence[Summary]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Mean KL against charged percent: a panel per donor kind, a curve per strategy."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in summaries:
        curve = panels.setdefault(one.donor, {}).setdefault(one.strategy, [])
        curve.append((100 * one.charged_share, one.mean_kl if one.mean_kl > ROUNDING else 0.0))
    return panels


def run_traffic(
    traces: Sequence[str],
    sizes: Sequence[int] | None,
    requests: int,
    console: Console,
    *,
    plot: str | None = None,
) -> dict[str, object]:
    """Every eviction policy on made-up traffic, and on real traces at ``sizes``."""
    if plot is not None:
        check_plot(plot)
    replayed = [*traffic.made_up(requests), *(traffic.read_trace(path, sizes) for path in traces)]
    with (
        Progress("replaying traffic") as progress,
        progress.step("replays", traffic.num_replays(replayed)) as step,
    ):
        rows = traffic.run(replayed, progress=step.advance, processes=os.cpu_count() or 1)
    console.print(traffic.traffic_table(rows))
    closed = traffic.mean_gap_closed(rows)
    for name, share in closed.items():
        console.print(f"{name}: {share:.0%} of the gap between LRU and the optimum closed")
    if plot is not None:
        plot_traffic(rows, plot, title="block hit rate by cache size")
        console.print(f"drawn in {plot}", highlight=False)
    return {
        "benchmark": "traffic",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": [row.as_json() for row in rows],
        "mean_gap_closed": closed,
    }
