"""Tables of the studies: where time goes, what settings give, what memory holds, what cost grows
with, and which function has the bug."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from kvboost.bench.timing import Sample

if TYPE_CHECKING:  # they print what they measure
    from kvboost.bench.breakdown import Breakdown
    from kvboost.bench.buglocal import BugSummary
    from kvboost.bench.memory import Memory
    from kvboost.bench.scaling import Series
    from kvboost.bench.sweep import Swept


def _table(title: str, *names: str, numbers: Sequence[str]) -> Table:
    """Columns of names, then of numbers; narrow, so that 80 columns hold many."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for name in names:
        table.add_column(name, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def spread(sample: Sample) -> str:
    median, low, high = sample.median_ms, sample.min_ms, sample.max_ms
    digits = 0 if median >= 10 else 1 if median >= 1 else 3
    return f"{median:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def breakdown_tables(rows: Sequence[Breakdown]) -> Iterator[Table]:
    """A table per case: phases downwards, lengths across. Phases that take no time in any case are
    left out."""
    phases = [phase for phase in rows[0].phases if any(row.phases[phase] >= 0.005 for row in rows)]
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        lengths = [f"{row.prompt_tokens:,}" for row in own]
        table = _table(f"{case}: milliseconds, medians", "prompt tokens", numbers=lengths)
        for phase in phases:
            table.add_row(phase, *(_ms(row.phases[phase]) for row in own))
        table.add_row("to the first token", *(_ms(row.ttft.median_ms) for row in own))
        table.add_row("whole call, by an outside clock", *(spread(row.outside) for row in own))
        table.add_row("of it in no phase", *(_ms(row.unaccounted_ms) for row in own))
        table.add_row("rows not computed", *(f"{row.not_computed:.0%}" for row in own))
        yield table


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def sweep_table(swept: Sequence[Swept]) -> Table:
    table = _table(
        f"{swept[0].questions} questions, the fastest first; *: no other is faster and closer",
        "",
        "chunks",
        "strategy",
        numbers=("bits", "ratio", "TTFT, ms", "÷ full", "hits", "B/token", "KL"),
    )
    for one in swept:
        table.add_row(
            "*" if one.is_best else "",
            f"{one.kept.chunking} {one.kept.chunk_size}",
            one.strategy,
            str(one.kept.bits),
            f"{one.ratio:.0%}" if one.ratio else "–",
            spread(one.ttft),
            f"{one.over_full:.2f}",
            f"{one.hit_rate:.0%}",
            f"{one.bytes_per_token:,.0f}",
            f"{one.mean_kl:.4f}",
            style="bold" if one.is_best else None,
        )
    return table


def memory_tables(rows: Sequence[Memory]) -> Iterator[Table]:
    table = _table(
        "a token in the cache, bytes", "bits", numbers=("measured", "expected", "difference")
    )
    for row in {row.bits: row for row in rows}.values():
        share = row.bytes_per_token / row.expected_bytes_per_token - 1
        table.add_row(
            str(row.bits),
            f"{row.bytes_per_token:,.1f}",
            f"{row.expected_bytes_per_token:,.1f}",
            f"{share:+.1%}",
        )
    yield table
    parts = ("libraries", "weights", "packed", "kv", "cache")
    table = _table(
        "a process at its peak, MB",
        "bits",
        numbers=("tokens", "libs", *parts[1:], "= all", "peak", "more", "loading"),
    )
    for row in rows:
        table.add_row(
            str(row.bits),
            f"{row.tokens:,}",
            *(f"{getattr(row, part):,.0f}" for part in parts),
            f"{row.predicted:,.0f}",
            f"{row.serve_peak:,.0f}",
            f"{row.difference:+,.0f} {row.difference / row.predicted:+.0%}",
            f"{row.load_peak:,.0f}",
        )
    yield table


def scaling_table(series: Sequence[Series]) -> Table:
    table = _table(
        "cost = factor × size ^ exponent (± standard error), milliseconds",
        "of",
        "against",
        numbers=("from", "to", "smallest", "largest", "exponent"),
    )
    for one in series:
        law = one.law
        error = "" if law.error is None else f" ± {law.error:.2f}"
        table.add_row(
            one.name,
            one.over,
            f"{one.sizes[0]:,}",
            f"{one.sizes[-1]:,}",
            _ms(one.samples[0].median_ms),
            _ms(one.samples[-1].median_ms),
            f"{law.exponent:.2f}{error}",
        )
    return table


def bug_table(summaries: Sequence[BugSummary], chance: float) -> Table:
    table = _table(
        f"{summaries[0].count} questions, chance {chance:.0%}; 95 % intervals in brackets",
        "",
        numbers=("right", "points off", "same", "reused", "TTFT, ms", "÷"),
    )
    full = summaries[0].ttft.median_ms
    for one in summaries:
        points = [100 * value for value in (one.difference, *one.difference_interval)]
        table.add_row(
            one.mode.removesuffix("_cache").removesuffix("_kv_reuse"),
            f"{one.accuracy:.1%} [{one.interval[0]:.0%}-{one.interval[1]:.0%}]",
            "–" if one is summaries[0] else "{:+.1f} [{:+.1f}…{:+.1f}]".format(*points),
            f"{one.same_answer:.0%}",
            f"{one.not_computed:.0%}",
            spread(one.ttft),
            f"{one.ttft.median_ms / full:.2f}",
        )
    return table
