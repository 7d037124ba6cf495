"""Pictures of results, for those who have matplotlib (the extra ``plot``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Points (charged share in percent, mean KL) of each strategy."""

SUFFIXES = (".png", ".svg")

# Okabe and Ito: told apart with any kind of colour vision. Their yellow is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v")  # one fewer than colours, so 30 pairs before any comes again
INK = "#333333"
GRID = "#DDDDDD"


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises ``ConfigError`` if no plot can be saved at ``path``: ask before a long run."""
    path = Path(path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"plot={str(path)!r} must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot={str(path)!r}: there is no folder {str(path.parent)!r}; create it")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "plots need matplotlib; install it with pip install 'kvboost[plot]'"
        ) from error


def plot_quality(
    panels: Mapping[str, Curves],
    path: str | os.PathLike[str],
    *,
    title: str,
    floor: float | None = None,
) -> None:
    """Saves :func:`quality_figure` as PNG or SVG, whichever ``path`` ends in."""
    check_plot(path)
    figure = quality_figure(panels, title=title, floor=floor)
    figure.savefig(Path(path).expanduser(), dpi=160)


def quality_figure(
    panels: Mapping[str, Curves], *, title: str, floor: float | None = None
) -> Figure:
    """Mean KL against charged share: a panel per donor kind, side by side, and in each a curve
    per strategy, which looks the same in every panel.

    ``floor`` is the KL that another dtype alone causes. A log axis has no place for a KL of zero:
    such points are drawn hollow and unconnected, below all others, and the legend says so.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    points = [point for curves in panels.values() for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("nothing to plot: no panel has a curve with points")
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("every share and every KL of a plot must be finite")
    kls = [kl for _, kl in points]
    zero_at = _below([*kls, floor or 0.0])
    heights = [max(kl, zero_at) for kl in (kls if floor is None else [*kls, floor])]
    strategies = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    looks = dict(zip(strategies, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))

    figure = Figure(figsize=(max(6.4, 1.2 + 3.6 * len(panels)), 4.6), layout="constrained")
    figure.suptitle(title, fontsize=13, color=INK)
    (row,) = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)
    row[0].set_ylabel("mean KL against full prefill, nats", fontsize=10, color=INK)
    for axes, (panel, curves) in zip(row, panels.items(), strict=True):
        axes.set_title(panel, fontsize=11, color=INK)
        axes.set_xlabel("charged share of moved tokens, %", fontsize=10, color=INK)
        axes.set_yscale("log")
        axes.set_ylim(min(heights) / 1.6, max(heights) * 1.6)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
        if floor is not None:
            axes.axhline(max(floor, zero_at), color=INK, linestyle="--", linewidth=1.2)
        for name, curve in curves.items():
            colour, marker = looks[name]
            x = [share for share, _ in sorted(curve)]
            y = [kl if kl > 0 else math.nan for _, kl in sorted(curve)]
            zeros = [share for share, kl in curve if kl <= 0]
            above = 3 - strategies.index(name) / len(strategies)  # the first named, often one point
            axes.plot(x, y, color=colour, marker=marker, linewidth=1.8, zorder=above, label=name)
            axes.scatter(
                zeros,
                [zero_at] * len(zeros),
                edgecolors=colour,
                facecolors="white",
                marker=marker,
                zorder=above,
            )

    handles = [
        Line2D([], [], color=colour, marker=marker, linewidth=1.8, label=name)
        for name, (colour, marker) in looks.items()
    ]
    if floor is not None:
        label = f"noise floor of another dtype ({floor:.2g})"
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.2, label=label))
    if min(kls) <= 0:
        label = f"hollow: KL of 0, drawn at {zero_at:.0e}"
        handles.append(Line2D([], [], color=INK, marker="o", mfc="white", ls="none", label=label))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 3 if len(panels) == 1 else 5),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure


def plain_log_labels(axis: Any) -> None:
    """Labels a log axis with plain numbers: powers of ten, and 2 and 5 times them."""

    def plain(value: float, _: int | None = None) -> str:
        return f"{value:,.0f}" if value >= 1 else f"{value:g}"

    axis.set_major_formatter(plain)
    axis.set_minor_formatter(lambda value, _: plain(value) if f"{value:e}"[0] in "25" else "")


def _below(values: Sequence[float]) -> float:
    """A power of ten well under the positive values, for what is not positive."""
    smallest = min((value for value in values if value > 0), default=1e-5)
    return float(10.0 ** math.floor(math.log10(smallest) - 0.5))
