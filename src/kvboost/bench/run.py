"""Whole benchmark runs: load, measure with a progress bar, show, and return what a script wants."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from rich.console import Console

from kvboost import ConfigError, KVBoost, StockModel
from kvboost.bench import report
from kvboost.bench.machine import describe
from kvboost.bench.ttft import Pooled, measure_decode, measure_ttft, rounds_of
from kvboost.bench.workloads import PATTERNS
from kvboost.progress import Progress


def run_ttft(
    model: str,
    patterns: Sequence[str] | None,
    lengths: Sequence[int],
    num_new: int,
    rounds: int,
    console: Console,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Every pattern at every length, and one decode step at the longest."""
    chosen = list(patterns or PATTERNS)
    for pattern in chosen:
        if pattern not in PATTERNS:
            raise ConfigError(f"pattern={pattern!r} is unknown; choose among {', '.join(PATTERNS)}")
    for length in lengths:
        if length <= num_new:
            raise ConfigError(f"tokens={length} must be more than the {num_new} new ones")
    engine = KVBoost.from_pretrained(model, device=device, dtype=dtype)
    stock = StockModel.from_pretrained(model, device=device, dtype=dtype)
    machine = describe(engine.device, engine.dtype)
    console.print(machine)
    with (
        Progress("measuring, interleaved") as progress,
        progress.step("rounds", total=rounds_of(chosen, lengths, rounds)) as step,
    ):
        rows = [
            measure_ttft(engine, stock, pattern, length, num_new, rounds, step.advance)
            for length in lengths
            for pattern in chosen
        ]
        decode = measure_decode(engine, stock, max(lengths), rounds, step.advance)
    engine.close()
    report.explain_ttft(console)
    console.print(report.ttft_table(rows))
    by_length = [[row for row in rows if row.num_tokens == length] for length in lengths]
    pooled = [Pooled.of(group) for group in by_length]
    console.print(report.pooled_table(pooled))
    console.print(report.decode_table([decode]))
    return {
        "benchmark": "ttft",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "machine": machine,
        "rounds": rounds,
        "rows": [row.as_json() for row in rows],
        "pooled": [vars(row) for row in pooled],
        "decode": decode.as_json(),
    }
