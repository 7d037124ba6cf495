"""Pictures of the studies (need the extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.bench.plots import COLOURS, GRID, INK, MARKERS, check_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvboost.bench.breakdown import Breakdown
    from kvboost.bench.buglocal import BugSummary
    from kvboost.bench.memory import Memory
    from kvboost.bench.scaling import Series
    from kvboost.bench.sweep import Swept

PHASE_COLOURS = {
    "tokenize": "#332288",
    "plan": "#009E73",
    "fetch": "#56B4E9",
    "assemble": "#CC79A7",
    "probe": "#E69F00",
    "repair": "#D55E00",
    "prefill": "#0072B2",
    "decode": "#999999",
    "admit": "#882255",
}
Where = str | os.PathLike[str]


def save(figure: Figure, path: Where) -> None:
    check_plot(path)
    figure.savefig(Path(path).expanduser(), dpi=160)


def new_figure(title: str, panels: int, width: float = 3.6) -> tuple[Figure, Any]:
    """A figure of panels side by side, in the look of all our figures."""
    from matplotlib.figure import Figure

    size = (max(6.4, 1.2 + width * panels), 4.6)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=13, color=INK)
    (row,) = figure.subplots(1, panels, squeeze=False)
    for axes in row:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", color=GRID, labelcolor=INK, labelsize=9)
    return figure, row


def label(axes: Any, x: str, y: str | None = None, title: str | None = None) -> None:
    axes.set_xlabel(x, fontsize=10, color=INK)
    if y is not None:
        axes.set_ylabel(y, fontsize=10, color=INK)
    if title is not None:
        axes.set_title(title, fontsize=11, color=INK)


def _legend(figure: Figure, handles: Sequence[Any], columns: int = 5) -> None:
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=min(len(handles), columns),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def plot_breakdown(rows: Sequence[Breakdown], path: Where, *, title: str) -> None:
    save(breakdown_figure(rows, title=title), path)


def breakdown_figure(rows: Sequence[Breakdown], *, title: str) -> Figure:
    """A panel per case, a bar per length, stacked by phase; a phase has one colour everywhere. The
    panels have scales of their own, as a hit is far below a full prefill."""
    from matplotlib.patches import Patch

    if not rows:
        raise ValueError("nothing to plot: there are no rows")
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, panels = new_figure(title, len(cases))
    phases = [phase for phase in rows[0].phases if any(row.phases[phase] > 0 for row in rows)]
    looks = {phase: PHASE_COLOURS.get(phase, INK) for phase in phases}
    for axes, case in zip(panels, cases, strict=True):
        own = [row for row in rows if row.case == case]
        label(axes, "prompt tokens", "milliseconds" if axes is panels[0] else None, case)
        axes.grid(axis="x", visible=False)
        bottoms = [0.0] * len(own)
        for phase, colour in looks.items():
            heights = [row.phases[phase] for row in own]
            axes.bar(range(len(own)), heights, 0.7, bottoms, color=colour, label=phase)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(own)), [f"{row.prompt_tokens:,}" for row in own])
    _legend(figure, [Patch(color=colour, label=phase) for phase, colour in looks.items()])
    return figure


def plot_sweep(swept: Sequence[Swept], path: Where, *, title: str) -> None:
    save(sweep_figure(swept, title=title), path)


def sweep_figure(swept: Sequence[Swept], *, title: str) -> Figure:
    """KL against time to first token: colour is the strategy, the mark the bits; the front of those
    that nothing beats is joined. What deviates by nothing is drawn at the lowest."""
    from matplotlib.lines import Line2D

    if not swept:
        raise ValueError("nothing to plot: there are no settings")
    figure, (axes,) = new_figure(title, 1, 6.4)
    label(axes, "time to first token, ms (median)", "mean KL against full prefill, nats")
    strategies = list(dict.fromkeys(sorted(one.strategy for one in swept)))
    bits = sorted({one.kept.bits for one in swept}, reverse=True)
    positive = [one.mean_kl for one in swept if one.mean_kl > 0]
    least = min(positive, default=1e-6)
    for one in swept:
        axes.scatter(
            one.ttft.median_ms,
            max(one.mean_kl, least),
            color=COLOURS[strategies.index(one.strategy) % len(COLOURS)],
            marker=MARKERS[bits.index(one.kept.bits) % len(MARKERS)],
            alpha=1.0 if one.is_best else 0.55,
            zorder=3,
        )
    front = sorted((one.ttft.median_ms, max(one.mean_kl, least)) for one in swept if one.is_best)
    axes.plot(*zip(*front, strict=True), color=INK, linestyle="--", linewidth=1.2, label="front")
    if positive:
        axes.set_yscale("log")
    handles = [
        *(
            Line2D([], [], color=COLOURS[at % len(COLOURS)], marker="o", ls="none", label=name)
            for at, name in enumerate(strategies)
        ),
        *(
            Line2D([], [], color=INK, marker=MARKERS[at], ls="none", label=f"{one} bits")
            for at, one in enumerate(bits)
        ),
        Line2D([], [], color=INK, ls="--", label="nothing is faster and closer"),
    ]
    _legend(figure, handles, 4)
    return figure


def plot_memory(rows: Sequence[Memory], path: Where, *, title: str) -> None:
    save(memory_figure(rows, title=title), path)


def memory_figure(rows: Sequence[Memory], *, title: str) -> Figure:
    """Left, bytes of a token by bits, measured and expected; right, the parts of the prediction
    stacked, with a mark at the peak that was measured."""
    if not rows:
        raise ValueError("nothing to plot: there are no rows")
    figure, (left, right) = new_figure(title, 2)
    tokens = list({row.bits: row for row in rows}.values())
    label(left, "bits", "KB per token in the cache", "a token")
    for at, row in enumerate(tokens):
        left.bar(at - 0.2, row.bytes_per_token / 1e3, 0.38, color=COLOURS[0])
        left.bar(at + 0.2, row.expected_bytes_per_token / 1e3, 0.38, color=GRID, edgecolor=INK)
    left.margins(y=0.25)
    left.set_xticks(range(len(tokens)), [str(row.bits) for row in tokens])
    left.text(0.98, 0.98, "blue: measured\ngrey: expected", transform=left.transAxes, fontsize=9)
    left.texts[-1].set(ha="right", va="top", color=INK)
    label(right, "bits, tokens", "MB", "a process at its peak")
    bottoms = [0.0] * len(rows)
    for colour, part in zip(
        COLOURS, ("libraries", "weights", "packed", "kv", "cache"), strict=False
    ):
        heights = [getattr(row, part) for row in rows]
        right.bar(range(len(rows)), heights, 0.7, bottoms, color=colour, label=part)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    peaks = [row.serve_peak for row in rows]
    right.plot(range(len(rows)), peaks, "D", color=INK, label="measured")
    right.set_xticks(range(len(rows)), [f"{row.bits}\n{row.tokens:,}" for row in rows])
    _legend(figure, right.get_legend_handles_labels()[0], 6)
    return figure


def plot_scaling(series: Sequence[Series], path: Where, *, title: str) -> None:
    save(scaling_figure(series, title=title), path)


def scaling_figure(series: Sequence[Series], *, title: str) -> Figure:
    """A panel per thing that grows, both axes logarithmic: what was measured, lowest to highest,
    and the law that fits it, with its exponent."""
    if not series:
        raise ValueError("nothing to plot: there are no series")
    over = list(dict.fromkeys(one.over for one in series))
    figure, panels = new_figure(title, len(over), 4.2)
    for axes, what in zip(panels, over, strict=True):
        label(axes, what, "milliseconds" if axes is panels[0] else None)
        axes.set_xscale("log")
        axes.set_yscale("log")
        own = [one for one in series if one.over == what]
        for colour, marker, one in zip(COLOURS, MARKERS, own, strict=False):
            medians = [sample.median_ms for sample in one.samples]
            lows = [sample.median_ms - sample.min_ms for sample in one.samples]
            highs = [sample.max_ms - sample.median_ms for sample in one.samples]
            axes.errorbar(one.sizes, medians, (lows, highs), fmt=marker, color=colour, capsize=2)
            law = one.law
            named = f"{one.name}: {law.exponent:.2f}"
            axes.plot(one.sizes, [law(size) for size in one.sizes], color=colour, label=named)
        axes.set_xticks(own[0].sizes, [f"{size:,}" for size in own[0].sizes])
        axes.xaxis.set_minor_formatter("")
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, title="exponent")
    return figure


def plot_bugs(summaries: Sequence[BugSummary], path: Where, *, title: str, chance: float) -> None:
    save(bug_figure(summaries, title=title, chance=chance), path)


def bug_figure(summaries: Sequence[BugSummary], *, title: str, chance: float) -> Figure:
    """Left, the share of right answers with its interval and the level of chance; right, time to
    first token, lowest to highest."""
    if not summaries:
        raise ValueError("nothing to plot: there are no modes")
    figure, (left, right) = new_figure(title, 2)
    names = [one.mode for one in summaries]
    label(left, "", "right answers, %", f"{summaries[0].count} questions")
    label(right, "", "time to first token, ms")
    for at, one in enumerate(summaries):
        colour = COLOURS[at % len(COLOURS)]
        around = [[one.accuracy - one.interval[0]], [one.interval[1] - one.accuracy]]
        percent = [[100 * value for value in side] for side in around]
        left.bar(at, 100 * one.accuracy, 0.7, color=colour, yerr=percent, ecolor=INK, capsize=3)
        middle = one.ttft.median_ms
        lines = [[middle - one.ttft.min_ms], [one.ttft.max_ms - middle]]
        right.bar(at, middle, 0.7, color=colour, yerr=lines, ecolor=INK, capsize=3)
    left.axhline(100 * chance, color=INK, linestyle="--", linewidth=1.2)
    left.set_ylim(0, min(100.0, 130 * max(one.interval[1] for one in summaries)))
    for axes in (left, right):
        axes.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
        axes.grid(axis="x", visible=False)
    left.text(0.02, 100 * chance, "chance", fontsize=9, color=INK, va="bottom")
    left.texts[-1].set_transform(left.get_yaxis_transform())
    return figure
