"""Servers under load: tables, notes and the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from kvboost.bench.kit.figures import Bars, Figure, Value, draw_bars
from kvboost.bench.kit.tables import dim, table, warning
from kvboost.bench.load.serve.stats import Row

UNEQUAL = 0.02
"""Prompts or answers whose mean lengths differ by more than this are worth a note."""
DISTURBED = 0.05
"""So is a processor that other programs used for more than this share of the time."""
NOTE = dim(
    "TTFT: from sending to the first text; ITL: from one piece of text to the next; ms by the "
    "client's clock.\ncached: share of prompt tokens the server says it did not compute; + moved: "
    "reused from another place."
)


def tables(rows: Sequence[Row], users: int) -> Iterator[Table]:
    """One per workload."""
    for workload, own in _by_workload(rows).items():
        first = own[0]
        prompt, answer = first.median.prompt_tokens, first.median.completion_tokens
        yield table(
            f"{workload}, {users} users: {first.median.requests:.0f} requests of about "
            f"{prompt:,.0f} tokens, {answer:.0f} tokens out; medians of {len(first.rounds)} rounds",
            ("system",),
            ("TTFT p50", "p95", "ITL p50", "p95", "req/s", "tok/s", "cached", "errors"),
            map(_cells, own),
        )


def notes(rows: Sequence[Row], planned: int) -> Iterator[Text]:
    """``planned``: the requests of a load, if there was time for all of them."""
    for note in (*inequalities(rows), *cut_short(rows, planned), *disturbed(rows)):
        yield warning(note)


def problems(errors: Mapping[str, str], failures: Mapping[str, str]) -> Iterator[Text]:
    for load, error in errors.items():
        yield warning(f"{load}: requests failed, the first with: {error}")
    for name, why in failures.items():
        yield Text(f"{name} was given up: {why}", style="red")


def inequalities(rows: Sequence[Row]) -> Iterator[str]:
    """Where systems did not read or write the same amount: their rates do not compare."""
    for workload, own in _by_workload(rows).items():
        for what in ("prompt_tokens", "completion_tokens"):
            lengths = {row.system: getattr(row.median, what) for row in own}
            if max(lengths.values()) > (1 + UNEQUAL) * min(lengths.values()):
                told = ", ".join(f"{name} {mean:.1f}" for name, mean in lengths.items())
                yield f"{workload}: mean {what.replace('_', ' ')} differ: {told}"


def cut_short(rows: Sequence[Row], planned: int) -> Iterator[str]:
    for row in rows:
        if row.median.requests < planned:
            yield (
                f"{row.workload}: {row.system} was too slow for all of {planned} requests; "
                f"{row.median.requests:.0f} were sent"
            )


def disturbed(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        shares = [one.others_share for one in row.rounds]
        if max(shares) > DISTURBED:
            told = ", ".join(f"{share:.0%}" for share in shares)
            yield (
                f"{row.workload}: other programs used the processors while {row.system} was "
                f"measured ({told} of the time, by rounds)"
            )


def serve_figure(rows: Sequence[Row], title: str) -> Figure:
    """Two panels, with a group of bars per workload in each: the median time to first token with a
    line up to the 95th percentile, and requests per second."""
    systems = dict.fromkeys(row.system for row in rows)
    times: Bars = {
        name: {
            row.workload: Value(
                row.median.ttft_p50_ms / 1e3,
                row.median.ttft_p50_ms / 1e3,
                max(row.median.ttft_p50_ms, row.median.ttft_p95_ms) / 1e3,
            )
            for row in rows
            if row.system == name
        }
        for name in systems
    }
    rates: Bars = {
        name: {row.workload: row.median.requests_per_s for row in rows if row.system == name}
        for name in systems
    }
    panels = {"time to first token": times, "throughput": rates}
    return draw_bars(panels, title=title, y=("seconds, p50 to p95", "requests per second"))


def _by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(row.workload for row in rows)
    return {name: [row for row in rows if row.workload == name] for name in names}


def _cells(row: Row) -> list[str]:
    one = row.median
    moved = f" + {one.moved_share:.0%}" if one.moved_share else ""
    return [
        row.system,
        *(f"{one.ttft_p50_ms:,.0f}", f"{one.ttft_p95_ms:,.0f}"),
        *(f"{one.itl_p50_ms:.0f}", f"{one.itl_p95_ms:.0f}"),
        *(f"{one.requests_per_s:.2f}", f"{one.tokens_per_s:.1f}"),
        *(f"{one.cached_share:.0%}{moved}", f"{one.errors:g}"),
    ]
