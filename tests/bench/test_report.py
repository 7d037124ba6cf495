from __future__ import annotations

from rich.console import Console

from kvboost import ReuseReport, Span, SpanKind
from kvboost.bench.quality import Row, summarize
from kvboost.bench.report import CELLS, RECOMPUTED, legend, prompt_map, quality_tables

EXACT, MOVED, COMPUTE = (CELLS[kind][0] for kind in ("exact", "moved", "compute"))


def test_the_map_shows_what_most_of_each_cell_is() -> None:
    spans = (Span(SpanKind.EXACT, 0, 75), Span(SpanKind.COMPUTE, 75, 100))
    assert prompt_map(ReuseReport(spans), width=8).plain == EXACT * 6 + COMPUTE * 2


def test_the_map_shows_where_moved_rows_were_recomputed() -> None:
    spans = (Span(SpanKind.MOVED, 0, 80), Span(SpanKind.COMPUTE, 80, 100))
    report = ReuseReport(spans, recomputed=(20, 21, 22, 23, 45))
    assert prompt_map(report, width=5).plain == MOVED + CELLS[RECOMPUTED][0] + MOVED * 2 + COMPUTE
    assert "recomputed" in CELLS and "computed again" in legend([report]).plain
    assert "exact" not in legend([report]).plain and "exact" in legend().plain


def test_quality_is_shown_by_donor_strategy_and_ratio() -> None:
    rows = [
        Row("q", "header", "auto", 0.15, kl, 1.0 - kl, first, 0.5, 0.4, 0.3, 0.17)
        for kl, first in ((0.1, None), (0.3, 4))
    ]
    (summary,) = summarize(rows)
    assert (summary.mean_kl, summary.same_text, summary.first_difference) == (0.2, 0.5, 4)
    console = Console(width=80, record=True)
    for table in quality_tables([summary]):
        console.print(table)
    shown = console.export_text()
    for part in ("behind the chat template's header (2 questions)", "15%", "17.0%", "0.2000"):
        assert part in shown
    assert "…" not in shown.replace("…+", "")  # nothing is cut off
