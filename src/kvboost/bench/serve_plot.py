"""A picture of servers under load (needs the extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.bench.plots import COLOURS, GRID, INK, check_plot, plain_log_labels
from kvboost.bench.serve_stats import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_serve(rows: Sequence[Row], path: str | os.PathLike[str], *, title: str) -> None:
    """Saves :func:`serve_figure` as PNG or SVG, whichever ``path`` ends in."""
    check_plot(path)
    serve_figure(rows, title=title).savefig(Path(path).expanduser(), dpi=160)


def serve_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """A column per workload and loop: above, on a log axis, the median time to first token with a
    line up to the 95th percentile; below, requests per second. A system has the same colour
    everywhere."""
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("nothing to plot: there are no rows")
    loads = list(dict.fromkeys((row.workload, row.loop) for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    figure = Figure(figsize=(max(6.4, 1.2 + 3.4 * len(loads)), 6.2), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    above, below = figure.subplots(2, len(loads), squeeze=False)
    above[0].set_ylabel("time to first token, s", fontsize=10, color=INK)
    below[0].set_ylabel("requests per second", fontsize=10, color=INK)
    for (workload, loop), top, bottom in zip(loads, above, below, strict=True):
        own = {
            row.system: row.median for row in rows if (row.workload, row.loop) == (workload, loop)
        }
        top.set_title(f"{workload}, {loop} loop", fontsize=11, color=INK)
        top.set_yscale("log")
        plain_log_labels(top.yaxis)
        for at, name in enumerate(systems):
            if name not in own:
                continue
            colour = COLOURS[at % len(COLOURS)]
            median, high = own[name].ttft_p50_ms / 1e3, own[name].ttft_p95_ms / 1e3
            label = f"{median:.2f}"
            _bar(top, at, median, colour, label, spread=max(0.0, high - median))
            rate = own[name].requests_per_s
            _bar(bottom, at, rate, colour, f"{rate:.2f}")
        for axes in (top, bottom):
            axes.set_xticks(range(len(systems)), systems, rotation=20)
            axes.grid(axis="y", color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
            axes.margins(y=0.12)
    return figure


def _bar(
    axes: object, at: int, height: float, colour: str, label: str, *, spread: float = 0.0
) -> None:
    axes.bar(at, height, color=colour, width=0.7)  # type: ignore[attr-defined]
    if spread:
        axes.errorbar(  # type: ignore[attr-defined]
            at, height, yerr=[[0.0], [spread]], color=INK, capsize=3, linewidth=1.2
        )
    axes.annotate(  # type: ignore[attr-defined]
        label,
        (at, height),
        xytext=(6 if spread else 0, 3),
        textcoords="offset points",
        ha="left" if spread else "center",
        fontsize=8,
        color=INK,
    )
