"""Tables and a picture of results over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle

from rich.console import Console
from rich.table import Table

from kvboost.bench.history import NOISE, Compared, Entry, Figure
from kvboost.bench.plots import COLOURS, MARKERS
from kvboost.bench.study_plots import label, new_figure, save

COLUMNS = 6
"""So many of the newest runs are shown side by side."""


def show_trend(groups: Sequence[Sequence[Entry]], console: Console) -> None:
    """A table per benchmark, model and machine: a row per figure, a column per run."""
    for group in groups:
        console.print(trend_table(group[-COLUMNS:]))


def trend_table(runs: Sequence[Entry]) -> Table:
    last = runs[-1]
    table = Table(title=f"{last.benchmark}, {last.model or 'no model'}: {last.machine_name}")
    table.add_column("median [lowest-highest]", overflow="fold")
    for run in runs:
        table.add_column(f"{run.date[:10]}\n{run.code}", justify="right", no_wrap=True)
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    for name, short in zip(names, shorter(names), strict=True):
        cells = (run.figures.get(name) for run in runs)
        table.add_row(short, *("–" if one is None else shown(one) for one in cells))
    return table


def shorter(names: Sequence[str]) -> list[str]:
    """Without the folder that all of them lie in."""
    first = {name.partition("/")[0] for name in names}
    alike = len(first) == 1 and all("/" in name for name in names)
    return [name.partition("/")[2] if alike else name for name in names]


def show_comparison(found: Sequence[Compared], console: Console, *, everything: bool) -> None:
    for one in found:
        title = f"{one.after.benchmark}, {one.after.model or 'no model'}: {one.after.machine_name}"
        if one.before is None:
            console.print(f"{title}: no earlier code to compare with", highlight=False)
            continue
        real = [change for change in one.changes if change.verdict != NOISE]
        runs = f"{one.runs[1]} and {one.runs[0]} runs"
        table = Table(title=f"{title}\n{one.before.code} → {one.after.code}, {runs}")
        for heading in ("figure", one.before.code, one.after.code, "verdict"):
            table.add_column(heading, justify="left" if heading == "figure" else "right")
        chosen = one.changes if everything else real
        for change, name in zip(chosen, shorter([one.figure for one in chosen]), strict=True):
            table.add_row(name, shown(change.before), shown(change.after), change.verdict)
        if table.row_count:
            console.print(table)
        quiet = len(one.changes) - len(real)
        console.print(f"{title}: {quiet} of {len(one.changes)} figures {NOISE}", highlight=False)
        low, high = one.drift
        if (low, high) != (1.0, 1.0):
            console.print(
                f"the same work without reuse took {low:.2f} to {high:.2f} times as long in the "
                "later runs: that is the machine",
                style="dim",
                highlight=False,
            )


def shown(figure: Figure) -> str:
    digits = 0 if figure.value >= 100 else 1 if figure.value >= 1 else 3
    low, high = (f"{value:.{digits}f}" for value in (figure.low, figure.high))
    return f"{figure.value:.{digits}f} [{low}-{high}]"


def plot_trend(group: Sequence[Entry], path: str | os.PathLike[str]) -> None:
    """Times over the runs of one benchmark on one machine, with their spread."""
    if not group:
        raise ValueError("nothing to plot: there are no runs")
    last = group[-1]
    figure, (axes,) = new_figure(f"{last.benchmark}: {last.machine_name}", 1, 7.0)
    label(axes, "run", "milliseconds")
    axes.set_yscale("log")
    names = [name for name, one in last.figures.items() if one.unit == "ms" and one.low > 0]
    looks = zip(names, cycle(COLOURS), cycle(MARKERS), strict=False)
    for name, colour, marker in looks:
        at = [number for number, run in enumerate(group) if name in run.figures]
        found = [group[number].figures[name] for number in at]
        spread = (
            [one.value - one.low for one in found],
            [one.high - one.value for one in found],
        )
        values = [one.value for one in found]
        axes.errorbar(at, values, spread, color=colour, marker=marker, capsize=2, label=name)
    axes.set_xticks(range(len(group)), [f"{run.date[:10]}\n{run.code}" for run in group])
    if len(names) <= 12:
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)
