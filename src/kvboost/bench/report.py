"""How results look on a terminal: tables and maps of prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvboost import ReuseReport, SpanKind
from kvboost.bench.moved import Moved, Turn
from kvboost.bench.quality import DONORS, RATIO_FREE, Summary
from kvboost.bench.timing import Sample

RECOMPUTED = "recomputed"
# Kind: mark (told apart without colours too), colour, meaning.
CELLS = {
    SpanKind.EXACT.value: ("█", "green", "exact: read before, not read again"),
    SpanKind.APPROXIMATE.value: ("▓", "blue", "this conversation's own past over moved text"),
    SpanKind.MOVED.value: ("▓", "cyan", "moved: read at another place"),
    RECOMPUTED: ("▚", "magenta", "moved, a fifth or more computed again"),
    SpanKind.COMPUTE.value: ("▒", "yellow", "computed now"),
}


def prompt_map(report: ReuseReport, width: int = 48) -> Text:
    """A prompt as one bar: each cell shows what most of its tokens are, and moved ones whether a
    fifth of them or more was computed again."""
    text = Text()
    total = report.prompt_tokens
    for cell in range(width):
        start, end = cell * total / width, (cell + 1) * total / width
        shares = {
            kind: sum(
                max(0.0, min(span.end, end) - max(span.start, start))
                for span in report.spans
                if span.kind is kind
            )
            for kind in SpanKind
        }
        kind = max(SpanKind, key=lambda kind: shares[kind])
        name = kind.value
        again = bisect_left(report.recomputed, end) - bisect_left(report.recomputed, start)
        if kind is SpanKind.MOVED and again >= 0.2 * shares[kind]:
            name = RECOMPUTED
        mark, colour, _ = CELLS[name]
        text.append(mark, style=colour)
    return text


def legend(reports: Sequence[ReuseReport] = ()) -> Text:
    """What the marks mean, a line each; given ``reports``, those that may occur in their maps."""
    kinds = {span.kind.value for report in reports for span in report.spans}
    if any(report.recomputed for report in reports):
        kinds.add(RECOMPUTED)
    shown = [cell for name, cell in CELLS.items() if not reports or name in kinds]
    lines = [Text(f"{mark} {meaning}", style=colour) for mark, colour, meaning in shown]
    return Text("\n").join(lines)


QUALITY_COLUMNS = {
    "ratio": "share of moved rows that was recomputed",
    "paid": "what repair cost per moved row, probes included",
    "KL": "deviation from full prefill over its answer: mean over questions, and median",
    "top-1": "tokens of the answer that stay the likeliest",
    "same": "questions with the very same greedy answer",
    "at": "where the others first differ, in tokens",
    "F1/full": "of the answers, with reuse and with full prefill",
    "95 %": "interval of the paired difference of F1",
    "TTFT": "time until the logits were there, as a share of full prefill's",
}


def quality_tables(summaries: Sequence[Summary]) -> Iterator[Table]:
    """A table per donor kind, narrow enough for 80 columns."""
    for donor in dict.fromkeys(one.donor for one in summaries):
        count = max(one.count for one in summaries if one.donor == donor)
        table = Table(
            title=f"{donor}: {DONORS.get(donor, donor)} ({count} questions)",
            box=None,
            padding=(0, 1, 0, 0),
            header_style="bold underline",
        )
        table.add_column("strategy", no_wrap=True)
        headings = ("ratio", "paid", "KL", "median", "top-1", "same", "at", "F1/full", "95 %")
        for heading in (*headings, "TTFT"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in summaries:
            if one.donor == donor:
                table.add_row(*_quality_cells(one))
        yield table


def explain_quality(console: Console) -> None:
    for name, meaning in QUALITY_COLUMNS.items():
        console.print(f"{name:8} {meaning}", style="dim", highlight=False, markup=False)


def _quality_cells(one: Summary) -> list[str]:
    low, high = one.f1_difference
    return [
        one.strategy,
        "–" if one.strategy in RATIO_FREE else f"{one.ratio:.0%}",
        f"{one.charged_share:.1%}",
        f"{one.mean_kl:.4f}",
        f"{one.median_kl:.4f}",
        f"{one.top1:.0%}",
        f"{one.same_text:.0%}",
        "–" if one.first_difference is None else f"{one.first_difference:.0f}",
        f"{one.f1:.2f}/{one.full_f1:.2f}",
        f"{low:+.2f}…{high:+.2f}",
        f"{one.ttft_ratio:.2f}",
    ]


def moved_table(moved: Moved) -> Table:
    table = Table(
        title=f"time to first token, ms: {moved.num_tokens:,} tokens, {moved.moved_tokens:,} of "
        f"them moved, {moved.ratio:.0%} of those recomputed"
    )
    for heading in ("stock", *moved.over_stock):
        table.add_column(heading.replace("_", " "), justify="right")
    table.add_row(
        *(spread(sample) for sample in (moved.stock, moved.auto, moved.cacheblend)),
        *(spread(sample) for sample in (moved.none, moved.no_hit)),
    )
    table.add_row("÷ stock", *(f"{ratio:.2f}" for ratio in moved.over_stock.values()))
    return table


def turns_table(turns: Sequence[Turn]) -> Table:
    table = Table(title="a conversation that began with moved passages, and the same one exact")
    for heading in ("turn", "moved, ms", "exact, ms", "KL to full prefill", "rows repaired"):
        table.add_column(heading, justify="right")
    for turn in turns:
        table.add_row(
            str(turn.number),
            f"{turn.moved_ms:.0f}",
            f"{turn.exact_ms:.0f}",
            f"{turn.moved_kl:.4f}",
            f"{turn.repaired_tokens:g}",
        )
    return table


def spread(sample: Sample) -> str:
    """The median, and lowest to highest in brackets."""
    brackets = f" [{sample.min_ms:.0f}-{sample.max_ms:.0f}]" if sample.median_ms >= 10 else ""
    return f"{median(sample)}{brackets}"


def median(sample: Sample) -> str:
    return f"{sample.median_ms:.0f}" if sample.median_ms >= 10 else f"{sample.median_ms:.1f}"
