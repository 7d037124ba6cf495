"""vLLM with KVBoost against vLLM without it: what moved text saves, and what the rest costs.

Both run in processes of their own, in turns. On CPUs this shows that the connector works and is no
comparison of engines.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import RenderableType

from benchmarks.entries import BENCHMARKS
from benchmarks.shapes import EXPERTS, SHAPES
from benchmarks.vllm_runs import Place, find_place, run_worker
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import ROUNDS, Bench, Report, duration, option
from kvboost.bench.kit.goals import Goal, judge, keeps_to
from kvboost.bench.kit.tables import dim, ms, table
from kvboost.config import DEFAULT_RATIO

GPU_LENGTHS, CPU_LENGTHS = (2048, 8192, 32768), (768,)
MOST_MOVED = {2048: 0.6, 8192: 0.33, 32768: 0.25}
"""The goals: first token over moved text, as a share of a full prefill's."""
MOST_OVERHEAD = 1.03
MOST_FROM_DISK = 0.15
GOAL_DOCUMENT = 4096
GOAL_SHAPE = "7b"
DECODING = {"cuda": 64, "cpu": 8}
ON_CPUS = (
    "Figures on CPUs show that the connector works. They do not compare engines: vLLM is made for "
    "GPUs, and runs eagerly in float32 here."
)


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"rounds": 3, "turns": 1}

    lengths: tuple[int, ...] = option(
        (), "Prompt tokens; 2048, 8192 and 32768 if not given, on CPUs 768.", "tokens", least=256
    )
    shape: str = option(
        GOAL_SHAPE, "The model's shape on a GPU, with random weights.", choices=(*SHAPES, *EXPERTS)
    )
    ratio: float = option(
        DEFAULT_RATIO, "The share of moved rows that is recomputed.", least=0.0, most=1.0
    )
    rounds: int = option(5, f"{ROUNDS} The first is not counted.", least=2, most=50)
    turns: int = option(2, "How often vLLM starts with the connector and without.", least=1, most=9)
    restart: int = option(
        GOAL_DOCUMENT,
        "Tokens of the documents that a vLLM started anew reads from disk; 0: none.",
        least=0,
    )


@dataclass(frozen=True)
class Figures:
    """Medians over the turns, in milliseconds."""

    with_connector: dict[str, Any]
    plain: dict[str, Any]

    def moved(self, length: int) -> float:
        """First token over moved text as a share of a full prefill's, in the same process."""
        found = self.with_connector[str(length)]
        return float(found["moved_ms"] / found["off_ms"])

    def cold(self, length: int) -> float:
        """A prompt of which nothing is known: with the connector ÷ without."""
        ours, plain = (one[str(length)]["cold_ms"] for one in (self.with_connector, self.plain))
        return float(ours / plain)

    @property
    def decode(self) -> float:
        return float(self.with_connector["decode"]["step_ms"] / self.plain["decode"]["step_ms"])


def run(settings: Settings, bench: Bench) -> Report:
    place = find_place()
    lengths = settings.lengths or (GPU_LENGTHS if place.on_gpu else CPU_LENGTHS)
    dtype = "bfloat16" if place.on_gpu else "float32"
    bench.describe(place.device, dtype, vllm=place.version)
    reports = _measure(settings, bench, place, lengths)
    from_disk = _restart(settings, bench, place) if settings.restart else None
    figures = Figures(*(_median(some) for some in reports.values()))
    shown: list[RenderableType] = [_table(figures, lengths)]
    if from_disk is not None:
        shown.append(_restart_table(from_disk))
    if not place.on_gpu:
        shown.append(dim(ON_CPUS))
    judged = place.on_gpu and settings.shape == GOAL_SHAPE
    return Report(
        {
            "lengths": list(lengths),
            "runs": reports,
            **_ratios(figures, lengths),
            "restart": from_disk,
        },
        shown,
        _goals(figures, lengths, judged, from_disk),
    )


def _measure(
    settings: Settings, bench: Bench, place: Place, lengths: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """The workers' reports, with the connector and without."""
    number = 2 * settings.turns
    bench.say(f"starts vLLM {number} times; after the first it is known how long that takes")
    reports: dict[str, list[dict[str, Any]]] = {"with connector": [], "plain": []}
    options = worker_options(settings, place, lengths)
    started = time.monotonic()
    for turn in range(number):
        name = "plain" if turn % 2 else "with connector"
        more = ["--plain"] if name == "plain" else []
        reports[name].append(run_worker(place, [*options, *more]))
        seconds = (time.monotonic() - started) / (turn + 1)
        left = number - turn - 1
        told = f"{name}: done after {duration(time.monotonic() - started)}"
        bench.say(told + (f"; about {duration(seconds * left)} left" if left else ""))
    return reports


def _restart(settings: Settings, bench: Bench, place: Place) -> dict[str, Any]:
    """One vLLM writes documents to a folder and ends; another reads them."""
    bench.say("starts vLLM twice more: one writes documents to disk, the next reads them")
    options = worker_options(settings, place, [settings.restart])
    with tempfile.TemporaryDirectory(prefix="kvboost-restart-") as folder:
        for what in ("write", "read"):
            report = run_worker(place, [*options, "--folder", folder, "--restart", what])
    found: dict[str, Any] = report["restart"]
    return {**found, "ratio": round(found["disk_ms"] / found["full_ms"], 3)}


def worker_options(settings: Settings, place: Place, lengths: Sequence[int]) -> list[str]:
    options = [
        *("--lengths", ",".join(map(str, lengths)), "--rounds", str(settings.rounds)),
        *("--ratio", str(settings.ratio), "--decoding", str(DECODING[place.device])),
    ]
    if place.on_gpu:
        return [*options, "--shape", settings.shape]
    options += ["--eager", "--dtype", "float32", "--gpu-cache", "0"]
    return [*options, "--model", str(place.model)]


def _median(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several: the median of every number."""
    return {
        name: {
            key: statistics.median(one[name][key] for one in reports)
            for key, value in part.items()
            if isinstance(value, (int, float))
        }
        for name, part in reports[0].items()
        if isinstance(part, dict)
    }


def _table(figures: Figures, lengths: Sequence[int]) -> RenderableType:
    ours, plain = figures.with_connector, figures.plain
    rows = []
    for length in lengths:
        found, title = ours[str(length)], f"{length:,} tokens"
        times = ms(found["moved_ms"]), ms(found["off_ms"])
        rows.append((f"{title}: moved ÷ computed", *times, f"{figures.moved(length):.3f}"))
        times = ms(found["cold_ms"]), ms(plain[str(length)]["cold_ms"])
        rows.append((f"{title}, new: with ÷ without", *times, f"{figures.cold(length):.3f}"))
    title = f"a step of {ours['decode']['requests']:.0f} decoding: with ÷ without"
    times = ms(ours["decode"]["step_ms"]), ms(plain["decode"]["step_ms"])
    rows.append((title, *times, f"{figures.decode:.3f}"))
    return table("KVBoost in vLLM: first token", ("",), ("ms", "÷ ms", "ratio"), rows)


def _restart_table(found: dict[str, Any]) -> RenderableType:
    title = f"a known document of {found['tokens']:,} tokens ÷ an unknown one"
    row = (title, ms(found["disk_ms"]), ms(found["full_ms"]), f"{found['ratio']:.3f}")
    return table("vLLM, started anew: first token from disk", ("",), ("ms", "÷ ms", "ratio"), [row])


def _ratios(figures: Figures, lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "moved": {str(length): round(figures.moved(length), 3) for length in lengths},
        "cold": {str(length): round(figures.cold(length), 3) for length in lengths},
        "decode": round(figures.decode, 3),
    }


def _goals(
    figures: Figures,
    lengths: Sequence[int],
    judged: bool,
    from_disk: dict[str, Any] | None,
) -> list[Goal]:
    """Only a GPU and the shape of the goals are judged on first tokens and steps."""
    share_of = {length: figures.moved(length) for length in MOST_MOVED if length in lengths}
    coldest = max(figures.cold(length) for length in lengths)
    found = [
        *(keeps_to(share_of.get(length), most) for length, most in MOST_MOVED.items()),
        keeps_to(coldest, MOST_OVERHEAD, "{:.3f}"),
        keeps_to(figures.decode, MOST_OVERHEAD, "{:.3f}"),
    ]
    if not judged:
        found = [(None, figure) for _, figure in found]
    reread = None
    if from_disk is not None and from_disk["tokens"] == GOAL_DOCUMENT:
        reread = from_disk["ratio"]
    found.append(keeps_to(reread, MOST_FROM_DISK, "{:.3f}"))
    return judge(BENCHMARKS["vllm"].goals, found)
