from __future__ import annotations

from kvboost import ReuseReport, Span, SpanKind
from kvboost.cli.demo import legend, prompt_map
from kvboost.results.explanation import MARKS, RECOMPUTED

EXACT, MOVED, COMPUTE = (MARKS[kind] for kind in ("exact", "moved", "compute"))


def test_the_map_shows_what_most_of_each_cell_is() -> None:
    spans = (Span(SpanKind.EXACT, 0, 75), Span(SpanKind.COMPUTE, 75, 100))
    assert prompt_map(ReuseReport(spans), width=8).plain == EXACT * 6 + COMPUTE * 2


def test_the_map_shows_where_moved_rows_were_recomputed() -> None:
    spans = (Span(SpanKind.MOVED, 0, 80), Span(SpanKind.COMPUTE, 80, 100))
    report = ReuseReport(spans, recomputed=(20, 21, 22, 23, 45))
    assert prompt_map(report, width=5).plain == MOVED + MARKS[RECOMPUTED] + MOVED * 2 + COMPUTE
    assert "computed again" in legend([report]).plain
    assert "exact" not in legend([report]).plain and "exact" in legend().plain
