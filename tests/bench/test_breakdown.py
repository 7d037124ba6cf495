from __future__ import annotations

import pytest

from kvboost.bench.breakdown import CASES, Breakdown, measure_breakdown, phase_sum
from kvboost.bench.study_plots import PHASE_COLOURS, breakdown_figure
from kvboost.bench.study_report import breakdown_tables
from kvboost.bench.timing import Sample
from kvboost.results import PHASES, Timings
from tiny import make_engine, tiny_model


def test_every_case_spends_its_time_where_it_should() -> None:
    with make_engine(
        tiny_model("llama", max_position_embeddings=4096), chunk_size=64, reuse_moved="always"
    ) as engine:
        rows = measure_breakdown(engine, 400, rounds=2)
        assert engine.cache_stats()["hot_chunks"] == 0  # nothing is left of it
    baseline, exact, moved = rows
    assert [row.case for row in rows] == list(CASES)
    assert baseline.not_computed == 0 < moved.not_computed < 1
    assert exact.not_computed > 0.8
    assert baseline.phases["assemble"] == baseline.phases["repair"] == 0
    assert exact.phases["assemble"] > 0 == exact.phases["repair"]
    assert moved.phases["probe"] > 0 < moved.phases["repair"]
    for row in rows:
        assert row.phases["prefill"] > 0 < row.phases["decode"]
        assert row.unaccounted_ms >= 0  # the outside clock sees all a request sees, and more
        assert row.outside.median_ms > row.ttft.median_ms


def test_all_phases_count() -> None:
    numbers = {f"{phase}_ms": 2.0**at for at, phase in enumerate(PHASES)}
    assert phase_sum(Timings(ttft_ms=1, total_ms=1, **numbers)) == 2 ** len(PHASES) - 1


def row(case: str, tokens: int, **phases: float) -> Breakdown:
    named = {phase: phases.get(phase, 0.0) for phase in PHASES if phase != "queue"}
    total = Sample(9.0, 8.0, 12.0)
    return Breakdown(case, tokens, tokens + 7, 0.5, named, total, total, 0.1)


ROWS = [row("baseline", 512, prefill=8.0), row("moved", 512, probe=2.0, repair=3.0, prefill=1.0)]


def test_a_table_per_case_leaves_out_what_takes_no_time(capsys) -> None:
    from rich.console import Console

    console = Console(width=80)
    for table in breakdown_tables(ROWS):
        console.print(table)
    shown = capsys.readouterr().out
    assert "baseline: " in shown and "moved: " in shown
    assert "probe" in shown and "fetch" not in shown
    assert "519" in shown and "9.0 [8.0-12.0]" in shown


def test_bars_are_stacked_to_the_sum_of_phases() -> None:
    _, moved = breakdown_figure(ROWS, title="x").axes
    top = max(bar.get_y() + bar.get_height() for bar in moved.patches)
    assert top == pytest.approx(6.0)
    assert set(PHASE_COLOURS) == set(PHASES) - {"queue"}
    with pytest.raises(ValueError, match="nothing to plot"):
        breakdown_figure([], title="x")
