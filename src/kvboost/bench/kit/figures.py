"""Pictures of results: lines and bars in one look (need matplotlib, the extra ``plot``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvboost.bench.kit.timing import Sample
from kvboost.config import install_extra
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # an optional package: imported when something is drawn

SUFFIXES = (".png", ".svg")

# Okabe and Ito: told apart with any kind of colour vision. Their yellow is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v")  # one fewer than colours, so 30 pairs before one repeats
INK = "#333333"
GRID = "#DDDDDD"


class Value(NamedTuple):
    """A measured value, and its range."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, value: Number) -> Value:
        if isinstance(value, Value):
            return value
        if isinstance(value, Sample):
            return cls(value.median_ms, value.min_ms, value.max_ms)
        return cls(value, value, value)


Number = float | Sample | Value
Lines = Mapping[str, Sequence[tuple[float, Number]]]
"""Points of each line by its name."""
Bars = Mapping[str, Mapping[str, Number]]
"""Heights by series and by group."""


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
        raise ConfigError(f"plots need matplotlib; {install_extra('plot')}") from error


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """As PNG or SVG, whichever ``path`` ends in."""
    check_plot(path)
    figure.savefig(Path(path).expanduser(), dpi=160)


def draw_lines(
    panels: Mapping[str, Lines],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> Figure:
    """Panels side by side, in each a line per name with its spread, on a log axis that ends in a
    linear part if there are zeros. A name looks the same in every panel; ``styles`` adds to its
    look."""
    from matplotlib.lines import Line2D

    points = [point for lines in panels.values() for line in lines.values() for point in line]
    if not points:
        raise ValueError("nothing to plot: no panel has a line with points")
    values = [Value.of(value) for _, value in points]
    heights = [value.middle for value in values]
    if not all(math.isfinite(number) for number in (*heights, *(at for at, _ in points))):
        raise ValueError("every number of a plot must be finite")
    least = min((height for height in heights if height > 0), default=1e-5)
    has_zeros = min(heights) <= 0
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    looks: dict[str, dict[str, Any]] = {
        name: {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.8, "label": name}
        | dict((styles or {}).get(name, {}))
        for name, colour, marker in zip(names, cycle(COLOURS), cycle(MARKERS), strict=False)
    }
    figure, row = _panels(title, len(panels), share=True)
    for axes, (panel, lines) in zip(row, panels.items(), strict=True):
        _label(axes, x, y if axes is row[0] else None, panel)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_yscale(
            **({"value": "symlog", "linthresh": least} if has_zeros else {"value": "log"})
        )
        plain_log_labels(axes.yaxis)
        for name, line in lines.items():
            _draw_line(axes, sorted(line, key=lambda point: point[0]), looks[name])
    bottom = -least / 5 if has_zeros else least / 1.6
    row[0].set_ylim(bottom, max(least, *(one.high for one in values)) * 1.6)
    shown = [look for look in looks.values() if not look["label"].startswith("_")]
    return _with_legend(figure, [Line2D([], [], **look) for look in shown])


def _draw_line(axes: Any, line: Sequence[tuple[float, Number]], look: Mapping[str, Any]) -> None:
    x, found = [at for at, _ in line], [Value.of(one) for _, one in line]
    axes.plot(x, [one.middle for one in found], **look)
    lows, highs = [one.low for one in found], [one.high for one in found]
    if lows != highs:
        axes.fill_between(x, lows, highs, color=look["color"], alpha=0.12, linewidth=0)


def draw_bars(
    panels: Mapping[str, Bars], *, title: str, y: Sequence[str], stacked: Sequence[str] = ()
) -> Figure:
    """Panels side by side, each with its own label of ``y``; in each a cluster of bars per group,
    and in that a bar per series. Spreads are lines. The series of panels that are ``stacked`` add
    up to one bar per group; then each panel has colours and a legend of its own."""
    from matplotlib.patches import Patch

    if not any(heights for bars in panels.values() for heights in bars.values()):
        raise ValueError("nothing to plot: there are no bars")
    names = list(dict.fromkeys(name for bars in panels.values() for name in bars))
    looks = dict(zip(names, cycle(COLOURS), strict=False))
    figure, row = _panels(title, len(panels), width=9.0 / len(panels))
    for axes, own, (panel, bars) in zip(row, y, panels.items(), strict=True):
        _label(axes, "", own, panel)
        groups = list(dict.fromkeys(group for heights in bars.values() for group in heights))
        if stacked:
            looks = dict(zip(bars, cycle(COLOURS), strict=False))
            _own_legend(axes, [Patch(color=looks[name], label=name) for name in bars])
        if panel in stacked:
            _stack(axes, bars, groups, looks)
            continue
        width = 0.84 / len(bars)
        for number, (name, heights) in enumerate(bars.items()):
            for group, height in heights.items():
                one = Value.of(height)
                place = groups.index(group) + (number - (len(bars) - 1) / 2) * width
                axes.bar(place, one.middle, width * 0.94, color=looks[name])
                if one.high > one.low:
                    line = [[one.middle - one.low], [one.high - one.middle]]
                    axes.errorbar(place, one.middle, line, color=INK, linewidth=0.9, capsize=2)
        _name_groups(axes, groups)
        axes.margins(y=0.12)
    if stacked:
        return cast("Figure", figure)
    return _with_legend(figure, [Patch(color=looks[name], label=name) for name in names])


def _stack(axes: Any, bars: Bars, groups: Sequence[str], looks: Mapping[str, str]) -> None:
    below = dict.fromkeys(groups, 0.0)
    for name, heights in bars.items():
        for group, height in heights.items():
            middle = Value.of(height).middle
            axes.bar(groups.index(group), middle, 0.8, bottom=below[group], color=looks[name])
            below[group] += middle
    _name_groups(axes, groups)


def _name_groups(axes: Any, groups: Sequence[str]) -> None:
    labels = [group.replace(", ", "\n") for group in groups]  # a line would run into the next
    axes.set_xticks(range(len(groups)), labels)
    axes.grid(axis="x", visible=False)


def plain_log_labels(axis: Any) -> None:
    """Labels a log axis with plain numbers: powers of ten, and 2 and 5 times them."""

    def plain(value: float, _: int | None = None) -> str:
        return f"{value:,.0f}" if value >= 1 else f"{value:g}"

    axis.set_major_formatter(plain)
    axis.set_minor_formatter(lambda value, _: plain(value) if f"{value:e}"[0] in "25" else "")


def _panels(title: str, count: int, *, width: float = 4.0, share: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 1.2 + width * count), 4.6), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    (row,) = figure.subplots(1, count, squeeze=False, sharey=share)
    for axes in row:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
    return figure, row


def _label(axes: Any, x: str, y: str | None, title: str) -> None:
    axes.set_xlabel(x, fontsize=10, color=INK)
    axes.set_title(title, fontsize=11, color=INK)
    if y is not None:
        axes.set_ylabel(y, fontsize=10, color=INK)


def _with_legend(figure: Figure, handles: Sequence[Any]) -> Figure:
    columns = min(len(handles), 5)
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)
    legend.set_frame_on(False)
    return figure


def _own_legend(axes: Any, handles: Sequence[Any]) -> None:
    """Below the axes of one panel."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    axes.legend(handles=handles, ncols=3, fontsize=9, frameon=False, **place)
