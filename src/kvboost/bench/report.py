"""How results look on a terminal: tables and maps of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvboost import ReuseReport, SpanKind
from kvboost.bench.ttft import TTFT, Decode, Pooled

COLOURS = {SpanKind.EXACT: "green", SpanKind.COMPUTE: "yellow"}
MARKS = {SpanKind.EXACT: "█", SpanKind.COMPUTE: "▒"}  # told apart without colours too


def prompt_map(report: ReuseReport, width: int = 48) -> Text:
    """A prompt as one bar: each cell shows what most of its tokens are."""
    text = Text()
    total = report.prompt_tokens
    for cell in range(width):
        start, end = cell * total / width, (cell + 1) * total / width
        kind = max(
            SpanKind,
            key=lambda kind: sum(
                max(0.0, min(span.end, end) - max(span.start, start))
                for span in report.spans
                if span.kind is kind
            ),
        )
        text.append(MARKS[kind], style=COLOURS[kind])
    return text


def legend() -> Text:
    return Text.assemble(
        (f"{MARKS[SpanKind.EXACT]} exact: read before, not read again   ", COLOURS[SpanKind.EXACT]),
        (f"{MARKS[SpanKind.COMPUTE]} computed now", COLOURS[SpanKind.COMPUTE]),
    )


def ttft_table(rows: Sequence[TTFT]) -> Table:
    table = Table(title="time to first token, ms (median; lowest to highest in brackets)")
    for heading in ("pattern", "tokens", "new"):
        table.add_column(heading)
    for heading in ("stock", "baseline", "÷ stock", "warm", "floor", "÷ floor", "faster"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.pattern,
            f"{row.num_tokens:,}",
            str(row.num_new),
            *(_spread(sample) for sample in (row.stock, row.baseline)),
            f"{row.baseline_over_stock:.2f}",
            *(_spread(sample) for sample in (row.warm, row.floor)),
            f"{row.warm_over_floor:.2f}",
            f"{row.speedup:.1f} ×",
        )
    return table


def pooled_table(rows: Sequence[Pooled]) -> Table:
    table = Table(title="all patterns together")
    for heading in ("tokens", "baseline ÷ stock", "warm ÷ floor", "faster than stock"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.num_tokens:,}",
            f"{row.baseline_over_stock:.2f}",
            f"{row.warm_over_floor:.2f}",
            f"{row.speedup:.1f} ×",
        )
    return table


def decode_table(rows: Sequence[Decode]) -> Table:
    table = Table(title="ms per generated token, whole call over a known prompt")
    for heading in ("prompt tokens", "stock generate", "ours", "÷ stock"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.num_tokens:,}",
            _spread(row.stock),
            _spread(row.ours),
            f"{row.ours_over_stock:.2f}",
        )
    return table


def explain_ttft(console: Console) -> None:
    console.print(
        "stock     full prefill by stock transformers\n"
        "baseline  ours without reuse\n"
        "warm      ours, everything but the new tokens read before\n"
        "floor     stock transformers with the KV already in its cache\n",
        style="dim",
        highlight=False,
    )


def _spread(sample: object) -> str:
    median, low, high = vars(sample).values()
    return f"{median:.0f} [{low:.0f}-{high:.0f}]" if median >= 10 else f"{median:.1f}"
