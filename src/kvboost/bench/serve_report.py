"""How servers under load look on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kvboost.bench.serve_stats import Row

UNEQUAL = 0.02
"""Prompts or answers whose mean lengths differ by more than this are worth a word."""
DISTURBED = 0.05
"""So is a processor that others used for more than this share of the time."""


def show(console: Console, rows: Sequence[Row], users: int, *, planned: int) -> None:
    """``planned``: the requests of a load, if there was time for all of them."""
    for table in tables(rows, users):
        console.print("", table)
    console.print(
        "TTFT: from sending to the first text; ITL: from one piece of text to the next; ms by the "
        "client's clock.\ncached: share of prompt tokens the server says it did not compute; "
        "+ moved: reused from another place.",
        style="dim",
        highlight=False,
    )
    for note in (*inequalities(rows), *cut_short(rows, planned), *disturbed(rows)):
        console.print(note, style="yellow", highlight=False)


def show_problems(console: Console, errors: Mapping[str, str], failures: Mapping[str, str]) -> None:
    for load, error in errors.items():
        said = f"{load}: requests failed, the first with: {error}"
        console.print(said, style="yellow", highlight=False, markup=False)
    for name, why in failures.items():
        console.print(f"{name} was given up: {why}", style="red", highlight=False, markup=False)


def tables(rows: Sequence[Row], users: int) -> Iterator[Table]:
    """One per workload and loop."""
    for workload, loop in dict.fromkeys((row.workload, row.loop) for row in rows):
        own = [row for row in rows if (row.workload, row.loop) == (workload, loop)]
        first = own[0]
        sent = f"{users} users" if first.rate is None else f"{first.rate:.2f} requests/s"
        prompt, answer = first.median.prompt_tokens, first.median.completion_tokens
        table = Table(
            title=f"{workload}, {loop} loop, {sent}: {first.median.requests:.0f} requests of about "
            f"{prompt:,.0f} tokens, {answer:.0f} tokens out; medians of {len(first.rounds)} rounds",
            box=None,
            padding=(0, 1, 0, 0),
            header_style="bold underline",
        )
        table.add_column("system", no_wrap=True)
        headings = ("TTFT p50", "p95", "ITL p50", "p95", "req/s", "tok/s", "cached", "errors")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in own:
            table.add_row(*_cells(row))
        yield table


def inequalities(rows: Sequence[Row]) -> Iterator[str]:
    """Where systems did not have the same to read or to write: their rates do not compare."""
    for workload, loop in dict.fromkeys((row.workload, row.loop) for row in rows):
        own = [row for row in rows if (row.workload, row.loop) == (workload, loop)]
        for what in ("prompt_tokens", "completion_tokens"):
            lengths = {row.system: getattr(row.median, what) for row in own}
            if max(lengths.values()) > (1 + UNEQUAL) * min(lengths.values()):
                said = ", ".join(f"{name} {mean:.1f}" for name, mean in lengths.items())
                yield f"{workload}, {loop} loop: mean {what.replace('_', ' ')} differ: {said}"


def cut_short(rows: Sequence[Row], planned: int) -> Iterator[str]:
    for row in rows:
        if row.median.requests < planned:
            yield (
                f"{row.workload}, {row.loop} loop: {row.system} was too slow for all of {planned} "
                f"requests; {row.median.requests:.0f} were sent"
            )


def disturbed(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        shares = [one.others_share for one in row.rounds]
        if max(shares) > DISTURBED:
            said = ", ".join(f"{share:.0%}" for share in shares)
            yield (
                f"{row.workload}, {row.loop} loop: others used the processors while {row.system} "
                f"was measured ({said} of the time, by rounds)"
            )


def _cells(row: Row) -> list[str]:
    one = row.median
    moved = f" + {one.moved_share:.0%}" if one.moved_share else ""
    return [
        row.system,
        f"{one.ttft_p50_ms:,.0f}",
        f"{one.ttft_p95_ms:,.0f}",
        f"{one.itl_p50_ms:.0f}",
        f"{one.itl_p95_ms:.0f}",
        f"{one.requests_per_s:.2f}",
        f"{one.tokens_per_s:.1f}",
        f"{one.cached_share:.0%}{moved}",
        f"{one.errors:g}",
    ]
