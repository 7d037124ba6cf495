"""Servers under load: tables, notes and the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from kvboost.bench.kit.figures import Bars, Figure, Value, draw_bars
from kvboost.bench.kit.tables import dim, ms, percent, table, warning
from kvboost.bench.serve.stats import Row

UNEQUAL = 0.02
"""Prompts or answers whose mean lengths differ by more than this are worth a note."""
NOTE = dim(
    "answers/s and its ratio to vllm's: median [least-most] of the rounds.\n"
    "TTFT: from sending to the first text; ITL: from one piece of text to the next; ms by the "
    "client's clock.\nloop, CPU: processor time for one answer, in ms, of our server's loop and of "
    "all of a server's processes.\nGPU: how busy the card was.\n"
    "cached: share of prompt tokens the server says it did not compute; moved: "
    "the part of it that was reused from another place."
)


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Two per load: how fast it was, and what it cost."""
    for load, own in _by_load(rows).items():
        first = own[0]
        prompt, answer = first.median.prompt_tokens, first.median.completion_tokens
        yield table(
            f"{load}: {first.median.requests:.0f} requests of about "
            f"{prompt:,.0f} tokens, {answer:.0f} tokens out; medians of {len(first.rounds)} rounds",
            ("system",),
            ("answers/s", "÷ vllm", "TTFT p50", "p95", "errors"),
            (_speed(row, row.rival(own)) for row in own),
        )
        yield table(
            f"{load}: each answer",
            ("system",),
            ("ITL p50", "p95", "loop", "CPU", "GPU", "cached"),
            map(_costs, own),
        )


def notes(rows: Sequence[Row], requests: int) -> Iterator[Text]:
    """``requests``: of each user, if there was time for all of them."""
    for row in rows:
        if beyond := row.median.beyond_server_p50_ms:
            said = f"{beyond:.1f} ms after the server's own clock says (p50)"
            yield dim(f"{_load(row)}: the first token of {row.system} arrives {said}")
    for note in (*inequalities(rows), *cut_short(rows, requests)):
        yield warning(note)


def problems(errors: Mapping[str, str], failures: Mapping[str, str]) -> Iterator[Text]:
    for load, error in errors.items():
        yield warning(f"{load}: requests failed, the first with: {error}")
    for name, why in failures.items():
        yield Text(f"{name} was given up: {why}", style="red")


def inequalities(rows: Sequence[Row]) -> Iterator[str]:
    """Where systems did not read or write the same amount: their rates do not compare."""
    for load, own in _by_load(rows).items():
        for what in ("prompt_tokens", "completion_tokens"):
            lengths = {row.system: getattr(row.median, what) for row in own}
            if max(lengths.values()) > (1 + UNEQUAL) * min(lengths.values()):
                told = ", ".join(f"{name} {mean:.1f}" for name, mean in lengths.items())
                yield f"{load}: mean {what.replace('_', ' ')} differ: {told}"


def cut_short(rows: Sequence[Row], requests: int) -> Iterator[str]:
    for row in rows:
        planned = row.users * requests
        if row.median.requests < planned:
            yield (
                f"{_load(row)}: {row.system} was too slow for all of {planned} requests; "
                f"{row.median.requests:.0f} were sent"
            )


def serve_figure(rows: Sequence[Row], title: str) -> Figure:
    """Two panels, with a group of bars per load in each: the median time to first token with a
    line up to the 95th percentile, and requests per second."""
    systems = dict.fromkeys(row.system for row in rows)
    times: dict[str, dict[str, Value]] = {name: {} for name in systems}
    rates: dict[str, dict[str, float]] = {name: {} for name in systems}
    for row in rows:
        middle, high = row.median.ttft_p50_ms / 1e3, row.median.ttft_p95_ms / 1e3
        times[row.system][_load(row)] = Value(middle, middle, max(middle, high))
        rates[row.system][_load(row)] = row.median.requests_per_s
    panels: dict[str, Bars] = {"time to first token": times, "throughput": rates}
    return draw_bars(panels, title=title, y=("seconds, p50 to p95", "requests per second"))


def _load(row: Row) -> str:
    return f"{row.workload}, {row.users} users"


def _by_load(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(map(_load, rows))
    return {name: [row for row in rows if _load(row) == name] for name in names}


def _speed(row: Row, rival: Row | None) -> list[str]:
    one = row.median
    return [
        row.system,
        _range(row.rate),
        "–" if rival is None or rival is row else _range(row.against(rival)),
        *(f"{one.ttft_p50_ms:,.0f}", f"{one.ttft_p95_ms:,.0f}", f"{one.errors:g}"),
    ]


def _costs(row: Row) -> list[str]:
    one = row.median
    moved = f", {one.moved_share:.0%} moved" if one.moved_share else ""
    times = one.itl_p50_ms, one.itl_p95_ms, one.loop_cpu_ms, one.process_cpu_ms
    return [
        row.system,
        *("–" if time is None else ms(time) for time in times),
        *(percent(one.gpu_share), f"{one.cached_share:.0%}{moved}"),
    ]


def _range(value: Value) -> str:
    return f"{value.middle:.2f} [{value.low:.2f}-{value.high:.2f}]"
