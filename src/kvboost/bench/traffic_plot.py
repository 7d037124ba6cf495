"""A picture of which policy keeps what comes back (needs the extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.bench.plots import COLOURS, GRID, INK, MARKERS, check_plot
from kvboost.bench.traffic import OPTIMUM, OURS, POLICIES, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_traffic(rows: Sequence[Row], path: str | os.PathLike[str], *, title: str) -> None:
    """Saves :func:`traffic_figure` as PNG or SVG, whichever ``path`` ends in."""
    check_plot(path)
    traffic_figure(rows, title=title).savefig(Path(path).expanduser(), dpi=160)


def traffic_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """Hit rate against cache size: a panel per traffic, side by side, and in each a line per
    policy, which looks the same in every panel; the optimum is dashed."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not rows:
        raise ValueError("nothing to plot: there are no rows")
    looks: dict[str, dict[str, Any]] = {
        name: {"color": colour, "marker": marker, "linewidth": 2.6 if name == OURS else 1.6}
        for name, colour, marker in zip(POLICIES, COLOURS, MARKERS, strict=False)
    }
    looks[OPTIMUM] = {"color": INK, "linestyle": "--", "linewidth": 1.4}
    traffics = list(dict.fromkeys(row.traffic for row in rows))
    figure = Figure(figsize=(max(6.4, 1.2 + 3.4 * len(traffics)), 4.4), layout="constrained")
    figure.suptitle(title, fontsize=13, color=INK)
    (panels,) = figure.subplots(1, len(traffics), squeeze=False)
    panels[0].set_ylabel("blocks served, %", fontsize=10, color=INK)
    for axes, traffic in zip(panels, traffics, strict=True):
        own = sorted((row for row in rows if row.traffic == traffic), key=lambda row: row.size)
        axes.set_title(traffic, fontsize=11, color=INK)
        axes.set_xlabel("cache size, blocks", fontsize=10, color=INK)
        axes.set_xscale("log")
        axes.set_xticks([row.size for row in own], [f"{row.size:,}" for row in own])
        axes.minorticks_off()
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
        for name, look in looks.items():
            rates = [100 * row.hit_rates[name] for row in own]
            above = 3 if name == OURS else 2
            axes.plot([row.size for row in own], rates, label=name, zorder=above, **look)
        axes.set_ylim(bottom=0)
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure
