"""A picture of engines on known text at other places (needs the extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.bench.interior.measure import Row
from kvboost.bench.interior.prompts import PLACES
from kvboost.bench.peers.engines import colours
from kvboost.bench.plots import COLOURS, GRID, INK, check_plot, plain_log_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_interior(rows: Sequence[Row], path: str | os.PathLike[str], *, title: str) -> None:
    """Saves :func:`interior_figure` as PNG or SVG, whichever ``path`` ends in."""
    check_plot(path)
    interior_figure(rows, title=title).savefig(Path(path).expanduser(), dpi=160)


def interior_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """A group of bars per place, a bar per engine, on a log axis; a line from the lowest to the
    highest, and above it the share of known text that was reused, where the engine tells."""
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("nothing to plot: there are no rows")
    places = [place for place in PLACES if any(row.place == place for row in rows)]
    engines = list(dict.fromkeys(row.engine for row in rows))
    looks = colours(engines, COLOURS, INK)
    width = 0.84 / len(engines)
    figure = Figure(figsize=(max(6.4, 2.2 * len(places)), 4.8), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    axes = figure.subplots()
    for at, engine in enumerate(engines):
        own = [row for row in rows if row.engine == engine]
        x = [places.index(row.place) + (at - (len(engines) - 1) / 2) * width for row in own]
        median = [row.ttft.median_ms for row in own]
        spread = [
            [row.ttft.median_ms - row.ttft.min_ms for row in own],
            [row.ttft.max_ms - row.ttft.median_ms for row in own],
        ]
        axes.bar(
            x,
            median,
            width * 0.94,
            yerr=spread,
            color=looks[engine],
            error_kw={"ecolor": INK, "linewidth": 0.9},
            label=engine,
        )
        for place, row in zip(x, own, strict=True):
            if row.reused_share is not None:
                axes.annotate(
                    f"{row.reused_share:.0%}",
                    (place, row.ttft.max_ms),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                    color=INK,
                )
    axes.set_xticks(range(len(places)), places)
    axes.set_yscale("log")
    plain_log_labels(axes.yaxis)
    axes.set_ylabel("time to first token, ms (%: known text reused)", fontsize=10, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
    axes.margins(y=0.1)
    figure.legend(loc="outside lower center", ncols=min(len(engines), 7), frameon=False, fontsize=9)
    return figure
