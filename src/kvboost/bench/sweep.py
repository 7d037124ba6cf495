"""Every way of cutting, keeping and repairing on the same questions: how fast, close and large.

A setting is a cutting of text into chunks, bits to keep them in, a strategy and a ratio. Every
question is answered once by full prefill; then each setting serves the same prompt, whose passages
were read before behind the chat template's header, is timed by an outside clock, and is compared
with what the full model makes of its own answer. Settings take turns on each question.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rich.console import Console

from kvboost import KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.plots import check_plot
from kvboost.bench.quality import Asked, Setting, cells_of
from kvboost.bench.questions import Question, choose_questions, make_questions
from kvboost.bench.record import record
from kvboost.bench.study_plots import plot_sweep
from kvboost.bench.study_report import sweep_table
from kvboost.bench.timing import Sample
from kvboost.config import CHUNKING, KV_BITS, STRATEGIES, EngineConfig, one_of, whole, within
from kvboost.model.load import LoadedModel, load
from kvboost.progress import Progress
from kvboost.results import kl_divergence

DONOR = "header"
ALL_CHUNKS = 1_000_000


@dataclass(frozen=True, order=True)
class Kept:
    """How an engine cuts and keeps text."""

    chunking: str
    chunk_size: int
    bits: int


@dataclass(frozen=True)
class Grid:
    """What is tried: every combination."""

    chunkings: Sequence[str] = CHUNKING
    chunk_sizes: Sequence[int] = (64, 128, 256)
    bits: Sequence[int] = (16, 4)
    strategies: Sequence[str] = ("auto", "cacheblend", "none")
    ratios: Sequence[float] = (0.15, 0.3)

    def __post_init__(self) -> None:
        for chunking in self.chunkings:
            one_of(chunking, CHUNKING, "chunking")
        for size in self.chunk_sizes:
            whole(size, 8, "chunk_size")
        for bits in self.bits:
            one_of(bits, KV_BITS, "bits")
        for strategy in self.strategies:
            one_of(strategy, STRATEGIES, "strategy")
        for ratio in self.ratios:
            within(ratio, 0.0, 1.0, "ratio")

    def kept(self) -> list[Kept]:
        return [Kept(*one) for one in product(self.chunkings, self.chunk_sizes, self.bits)]

    def repairs(self) -> list[tuple[str, float]]:
        return list(cells_of(self.strategies, self.ratios))

    def __len__(self) -> int:
        return len(self.kept()) * len(self.repairs())


@dataclass(frozen=True)
class Served:
    """One question, served in one setting."""

    kept: Kept
    strategy: str
    ratio: float
    ttft_ms: float
    full_ms: float
    hit_rate: float
    """Share of the prompt's rows that were not computed."""
    kl: float
    bytes_per_token: float


@dataclass(frozen=True)
class Swept:
    """A setting over all questions."""

    setting: str
    kept: Kept
    strategy: str
    ratio: float
    questions: int
    ttft: Sample
    over_full: float
    hit_rate: float
    mean_kl: float
    bytes_per_token: float
    is_best: bool
    """No other setting is both faster and closer: it lies on the Pareto front."""


def measure_sweep(
    loaded: LoadedModel,
    questions: Sequence[Question],
    grid: Grid,
    setting: Setting,
    on_cell: Callable[[], None] = lambda: None,
) -> Iterator[Served]:
    """Every question in every setting. Each second question goes through them backwards; the first
    is served once before, uncounted."""
    engines = {
        kept: KVBoost(
            loaded,
            EngineConfig(
                chunking=kept.chunking,
                chunk_size=kept.chunk_size,
                kv_cache_bits=kept.bits,
                reuse_moved="always",
            ),
        )
        for kept in grid.kept()
    }
    first = next(iter(engines.values()))
    try:
        for number, question in enumerate(questions):
            other = questions[(number + 1) % len(questions)]
            if other is question:
                other = make_questions(1, seed=1)[0]
            asked = Asked(first, question, other, setting, seed=number)
            full_ms = _timed(first, asked.prompt, "baseline")
            order = list(engines.items())
            for kept, engine in reversed(order) if number % 2 else order:
                asked.through(engine).read_before(DONOR, DONOR)
                stored = engine.chunks(ALL_CHUNKS)
                size = sum(one["bytes"] for one in stored) / sum(one["tokens"] for one in stored)
                for repair in grid.repairs():
                    if not number:
                        _timed(engine, asked.prompt, "chunk_kv_reuse", *repair)
                    yield _serve(engine, asked, kept, repair, full_ms, size)
                    on_cell()
                engine.forget_salt(DONOR)
    finally:
        for engine in engines.values():
            engine.close()


def _serve(
    engine: KVBoost,
    asked: Asked,
    kept: Kept,
    repair: tuple[str, float],
    full_ms: float,
    bytes_per_token: float,
) -> Served:
    strategy, ratio = repair
    ttft_ms = _timed(engine, asked.prompt, "chunk_kv_reuse", strategy, ratio)
    scored = engine.score(
        asked.prompt,
        asked.answer,
        cache_salt=DONOR,
        recompute_strategy=strategy,
        recompute_ratio=ratio,
    )
    divergence = float(kl_divergence(asked.logits, scored.logits).mean())
    return Served(
        kept,
        strategy,
        ratio,
        ttft_ms,
        full_ms,
        scored.reuse.kv_reuse_ratio,
        max(0.0, divergence),
        bytes_per_token,
    )


def _timed(
    engine: KVBoost,
    prompt: list[int],
    mode: str,
    strategy: str | None = None,
    ratio: float | None = None,
) -> float:
    start = time.perf_counter()
    engine.generate(
        prompt,
        1,
        mode,
        cache_salt=DONOR,
        recompute_strategy=strategy,
        recompute_ratio=ratio,
        keep=False,
    )
    return (time.perf_counter() - start) * 1e3


def summarize(rows: Sequence[Served]) -> list[Swept]:
    """A row per setting, the fastest first."""
    groups: dict[tuple[Kept, str, float], list[Served]] = {}
    for row in rows:
        groups.setdefault((row.kept, row.strategy, row.ratio), []).append(row)
    points = {
        key: (
            statistics.median(row.ttft_ms for row in group),
            statistics.mean(row.kl for row in group),
        )
        for key, group in groups.items()
    }
    best = pareto(list(points.values()))
    swept = [
        Swept(
            f"{kept.chunking} {kept.chunk_size}, {kept.bits} bits, {strategy} {ratio:g}",
            kept,
            strategy,
            ratio,
            len(group),
            Sample.of([row.ttft_ms for row in group]),
            statistics.median(row.ttft_ms / row.full_ms for row in group),
            statistics.mean(row.hit_rate for row in group),
            points[kept, strategy, ratio][1],
            statistics.mean(row.bytes_per_token for row in group),
            points[kept, strategy, ratio] in best,
        )
        for (kept, strategy, ratio), group in groups.items()
    ]
    return sorted(swept, key=lambda one: one.ttft.median_ms)


def pareto(points: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """The points that no other one beats in one coordinate without losing in the other."""
    best: set[tuple[float, float]] = set()
    lowest = float("inf")
    for point in sorted(points):
        if point[1] < lowest:
            best.add(point)
            lowest = point[1]
    return best


def run_sweep(
    model: str,
    grid: Grid,
    setting: Setting,
    limit: int,
    console: Console,
    *,
    datasets: Sequence[str] = (),
    plot: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    if plot is not None:
        check_plot(plot)
    questions = choose_questions(datasets, limit, "1/1")
    loaded = load(model, device=device, dtype=dtype)
    machine = describe(loaded.device, loaded.forward.shape.dtype)
    console.print(machine)
    with (
        Progress(f"{len(grid)} settings, {len(questions)} questions") as progress,
        progress.step("served", len(grid) * len(questions)) as step,
    ):
        rows = list(measure_sweep(loaded, questions, grid, setting, step.advance))
    swept = summarize(rows)
    console.print(sweep_table(swept))
    if plot is not None:
        plot_sweep(swept, plot, title=f"{model}: deviation against time to first token")
        console.print(f"drawn in {plot}", highlight=False)
    settings = [asdict(one) for one in swept]
    return record("sweep", model, machine, questions=len(questions), settings=settings)
