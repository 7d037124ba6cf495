from __future__ import annotations

import time
from dataclasses import asdict

import pytest

from kvboost import GenerationResult, ReuseReport, Span, SpanKind, Timings
from kvboost.results import PHASES, Clock


def test_phases_add_up_to_the_total_and_ttft_runs_from_entry() -> None:
    clock = Clock()
    time.sleep(0.002)
    clock.lap("plan")
    time.sleep(0.002)
    clock.first_token()
    clock.lap("prefill")
    time.sleep(0.002)
    clock.lap("decode")
    clock.lap("decode")
    timings = clock.timings()
    phases = [asdict(timings)[f"{phase}_ms"] for phase in PHASES]
    assert sum(phases) == pytest.approx(timings.total_ms)
    assert timings.plan_ms + timings.prefill_ms == pytest.approx(timings.ttft_ms, abs=0.5)
    assert timings.total_ms >= 6


def test_a_report_counts_rows() -> None:
    report = ReuseReport((Span(SpanKind.EXACT, 0, 30, "a"), Span(SpanKind.COMPUTE, 30, 40)))
    assert (report.prompt_tokens, report.cached_tokens, report.kv_reuse_ratio) == (40, 30, 0.75)
    assert ReuseReport(()).kv_reuse_ratio == 0


def test_a_result_is_described_in_one_short_line() -> None:
    timings = Timings(ttft_ms=38.4, total_ms=1234.0, **{f"{phase}_ms": 0.0 for phase in PHASES})
    report = ReuseReport((Span(SpanKind.EXACT, 0, 1500, "a"), Span(SpanKind.COMPUTE, 1500, 2000)))
    result = GenerationResult("word " * 200, list(range(200)), "stop", timings, report)
    assert result.generated_tokens == 200
    assert repr(result) == (
        f"GenerationResult({'word ' * 12 + '…'!r}, 200 tokens, 'stop'; prompt of 2,000 tokens, "
        "75% reused; first token after 38 ms, all after 1,234 ms)"
    )
