"""Models larger than a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rich.console import RenderableType

from benchmarks.entries import BENCHMARKS
from benchmarks.larger import streaming
from benchmarks.shapes import SHAPES, device_for
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.bench.kit.figures import draw_bars
from kvboost.bench.kit.goals import Goal, judge, reaches
from kvboost.bench.kit.tables import table
from kvboost.config import format_bytes, parse_bytes

GOAL_SHAPE, GOAL_MEMORY = "32b", 8 << 30
"""The shape and memory that the goals are about."""
ONE, EIGHT, CODE = "1 request", "8 requests", streaming.CODE
TINY_MEMORY = 144 << 20
"""Some layers of the tiny shape fit into this, and a MiB for the KV of each request."""


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"seconds": 5.0}

    shape: str = option(
        GOAL_SHAPE, "The shape of the model; tiny runs without a GPU.", choices=tuple(SHAPES)
    )
    memory: str = option("8GiB", "What the engine may take of the GPU's memory.", "device-memory")
    requests: tuple[int, ...] = option((1, 8), "Requests that decode together.", least=1)
    seconds: float = option(15.0, "About how long each of the paces is measured.", least=0.1)


def run(settings: Settings, bench: Bench) -> Report:
    device = device_for("larger", [settings.shape])
    bench.describe(device, "int4, bfloat16" if device == "cuda" else "float32")
    memory = parse_bytes(settings.memory, "device-memory")
    if settings.shape == "tiny":
        memory = TINY_MEMORY + (max(settings.requests) << 20)
    found = streaming.measure(settings.shape, memory, settings.requests, settings.seconds, bench)
    problems = found.pop("problems")
    return Report(
        {"streaming": {settings.shape: found}},
        [_table(settings.shape, found), _projection(found)],
        goals_of(settings.shape, found),
        partial(_draw, found) if found["runs"] else None,
        problems,
    )


def _table(shape: str, found: dict[str, Any]) -> RenderableType:
    rows = [
        (
            name,
            f"{one['tokens_per_s']:.2f}",
            f"{one['bytes_per_s'] / 1e9:.1f}",
            f"{one['share_of_bus']:.0%}",
        )
        for name, one in found["runs"].items()
    ]
    streamed = found["layers"] - found["resident"]
    title = (
        f"{shape} in {format_bytes(found['device_memory'])}: {streamed} of {found['layers']} "
        f"layers streamed, {found['pass_bytes'] / 1e9:.2f} GB a pass; the bus gives "
        f"{found['bus_bytes_per_s'] / 1e9:.1f} GB/s = {found['limit_tokens_per_s']:.2f} tokens/s"
    )
    return table(title, ("",), ("tokens/s", "GB/s", "of the bus"), rows)


def _projection(found: dict[str, Any]) -> str:
    others = ", ".join(f"{name}: {rate:.2f}" for name, rate in found["projections"].items())
    peak = found.get("peak_reserved")
    told = "" if peak is None else f"; peak of reserved memory: {format_bytes(peak)}"
    return f"limits of other buses for one request, in tokens/s: {others}{told}"


def goals_of(shape: str, found: dict[str, Any]) -> list[Goal]:
    runs = found["runs"]
    one, eight, code = (runs.get(name, {}) for name in (ONE, EIGHT, CODE))
    peak, memory = found.get("peak_reserved"), found["device_memory"]
    alone = one.get("tokens_per_s")
    judged = [
        reaches(one.get("share_of_bus"), 0.9, "{:.0%}"),
        reaches(alone, 3.9),
        reaches(alone and _times(eight, alone), 7.0, "{:.2f} ×"),
        reaches(alone and _times(code, alone), 2.0, "{:.2f} ×"),
        (None, "not measured") if peak is None else (peak <= memory, format_bytes(peak)),
    ]
    is_another = shape != GOAL_SHAPE or memory > GOAL_MEMORY
    return judge(BENCHMARKS["larger"].goals, judged, "another shape" if is_another else None)


def _times(run: dict[str, Any], alone: float) -> float | None:
    return run["tokens_per_s"] / alone if run else None


def _draw(found: dict[str, Any], title: str) -> Any:
    runs = found["runs"]
    paces = {name: one["tokens_per_s"] for name, one in runs.items()}
    rates = {name: one["bytes_per_s"] / 1e9 for name, one in runs.items()}
    limit = dict.fromkeys(runs, found["bus_bytes_per_s"] / 1e9)
    return draw_bars(
        {"answers": {"streamed": paces}, "the bus": {"streamed": rates, "a plain copy": limit}},
        title=title,
        y=("tokens/s", "GB/s"),
    )
