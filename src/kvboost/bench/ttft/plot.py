"""A picture of times to first token (needs the extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.bench.peers.engines import OURS, OURS_PREFIX, STOCK, colours
from kvboost.bench.plots import COLOURS, GRID, INK, MARKERS, check_plot, plain_log_labels
from kvboost.bench.timing import Sample
from kvboost.bench.ttft.lengths import Length
from kvboost.bench.ttft.patterns import CONTENDERS
from kvboost.bench.ttft.peers import PeerTime

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[int, Sample]]]
"""Points (tokens, milliseconds) of each contender."""

COLD = ", cold"
LABELS = {
    "stock": "stock",
    "baseline": "KVBoost, no reuse",
    "warm": "KVBoost, exact prefix",
    "chunk": "KVBoost, moved text",
    "floor": "floor: stock, KV already there",
}


def curves(points: Sequence[Length], peers: Sequence[PeerTime]) -> dict[str, Curves]:
    """By panel: in one process, and behind the pipe."""
    own = {
        LABELS[name]: [(point.num_tokens, point.times[name]) for point in points]
        for name in CONTENDERS
    }
    panels: dict[str, Curves] = {"in one process": own}
    names = dict.fromkeys(row.name for row in peers)
    if names:
        panels["engines: warm prefix; dashed: all to be read"] = {
            f"{name}{kind}": [
                (row.num_tokens, row.cold if kind else row.warm)
                for row in peers
                if row.name == name
            ]
            for name in names
            for kind in ((COLD,) if name == STOCK else ("", COLD))  # stock keeps nothing
        }
    return panels


def plot_ttft(panels: Mapping[str, Curves], path: str | os.PathLike[str], *, title: str) -> None:
    """Saves :func:`ttft_figure` as PNG or SVG, whichever ``path`` ends in."""
    check_plot(path)
    ttft_figure(panels, title=title).savefig(Path(path).expanduser(), dpi=160)


def ttft_figure(panels: Mapping[str, Curves], *, title: str) -> Figure:
    """Time to first token against prompt length, both on log axes: a panel each, a line per
    contender with its spread. Cold lines are dashed, in the colour of their engine."""
    from matplotlib.figure import Figure

    if not any(curve for lines in panels.values() for curve in lines.values()):
        raise ValueError("nothing to plot: no panel has a line with points")
    figure = Figure(figsize=(1.2 + 5.4 * len(panels), 5.0), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    (row,) = figure.subplots(1, len(panels), sharex=True, squeeze=False)
    row[0].set_ylabel("time to first token, ms", fontsize=10, color=INK)
    for axes, (panel, lines) in zip(row, panels.items(), strict=True):
        axes.set_title(panel, fontsize=11, color=INK)
        axes.set_xlabel("prompt, tokens", fontsize=10, color=INK)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        plain_log_labels(axes.yaxis)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
        engines = list(dict.fromkeys(name.removesuffix(COLD) for name in lines))
        looks = colours(engines, COLOURS, INK)
        for at, engine in enumerate(engines):
            for name in (engine, engine + COLD):
                _line(axes, name, lines.get(name, ()), looks[engine], MARKERS[at % len(MARKERS)])
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _line(
    axes: object, name: str, curve: Sequence[tuple[int, Sample]], colour: str, marker: str
) -> None:
    points = sorted(curve, key=lambda point: point[0])
    if not points:
        return
    lengths = [tokens for tokens, _ in points]
    is_cold = name.endswith(COLD)
    is_ours = name.startswith("KVBoost") or name in (OURS, OURS_PREFIX)
    axes.plot(  # type: ignore[attr-defined]
        lengths,
        [sample.median_ms for _, sample in points],
        color=colour,
        marker=marker,
        markersize=4,
        linestyle="--" if is_cold else "-",
        linewidth=2.4 if is_ours else 1.5,
        alpha=0.6 if is_cold else 1.0,
        label=name if name == STOCK + COLD or not is_cold else f"_{name}",
    )
    axes.fill_between(  # type: ignore[attr-defined]
        lengths,
        [sample.min_ms for _, sample in points],
        [sample.max_ms for _, sample in points],
        color=colour,
        alpha=0.12,
        linewidth=0,
    )
