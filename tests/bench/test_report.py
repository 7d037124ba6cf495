from __future__ import annotations

from kvboost import ReuseReport, Span, SpanKind
from kvboost.bench.report import MARKS, prompt_map


def test_the_map_shows_what_most_of_each_cell_is() -> None:
    spans = (Span(SpanKind.EXACT, 0, 75), Span(SpanKind.COMPUTE, 75, 100))
    text = prompt_map(ReuseReport(spans), width=8).plain
    assert text == MARKS[SpanKind.EXACT] * 6 + MARKS[SpanKind.COMPUTE] * 2
