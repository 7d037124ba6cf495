"""How times to first token look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kvboost.bench.report import median, spread
from kvboost.bench.ttft.chat import EARLY, LATE, Chat
from kvboost.bench.ttft.clock import ClockCheck
from kvboost.bench.ttft.lengths import Length
from kvboost.bench.ttft.patterns import CONTENDERS, TTFT, Decode, Pooled
from kvboost.bench.ttft.peers import PeerTime

WIDE = 110
MEANINGS = {
    "stock": "full prefill by stock transformers",
    "baseline": "ours without reuse",
    "warm": "ours, everything but the new tokens read before (prefix cache, exact)",
    "chunk": "ours, the same text behind other words than it was read behind (moved, repaired)",
    "floor": "stock transformers with the KV already in its cache",
}


def explain_ttft(console: Console) -> None:
    for name, meaning in MEANINGS.items():
        console.print(f"{name:9} {meaning}", style="dim", highlight=False)


def ttft_table(rows: Sequence[TTFT], width: int = WIDE) -> Table:
    """Medians only where ``width`` has no room for more."""
    brief = width < WIDE
    told = median if brief else spread
    table = _table(
        f"time to first token, ms (median{'' if brief else '; lowest to highest in brackets'})",
        ("pattern", "tokens"),
        ("stock", "baseline", "÷ stock", "warm", "chunk", "floor", "÷ floor", "faster"),
    )
    for row in rows:
        table.add_row(
            row.pattern,
            f"{row.num_tokens:,}",
            told(row.stock),
            told(row.baseline),
            f"{row.baseline_over_stock:.2f}",
            told(row.warm),
            told(row.chunk),
            told(row.floor),
            f"{row.warm_over_floor:.2f}",
            f"{row.speedup:.1f} ×",
        )
    return table


def pooled_table(rows: Sequence[Pooled]) -> Table:
    headings = ("baseline ÷ stock", "warm ÷ floor", "warm faster than stock", "chunk faster")
    table = _table("all patterns together", ("tokens",), headings)
    for row in rows:
        table.add_row(
            f"{row.num_tokens:,}",
            f"{row.baseline_over_stock:.2f}",
            f"{row.warm_over_floor:.2f}",
            f"{row.speedup:.1f} ×",
            f"{row.chunk_speedup:.1f} ×",
        )
    return table


def decode_table(rows: Sequence[Decode]) -> Table:
    headings = ("stock generate", "ours", "÷ stock")
    table = _table(
        "ms per generated token, whole call over a known prompt", ("prompt tokens",), headings
    )
    for row in rows:
        cells = spread(row.stock), spread(row.ours), f"{row.ours_over_stock:.2f}"
        table.add_row(f"{row.num_tokens:,}", *cells)
    return table


def lengths_table(points: Sequence[Length]) -> Table:
    table = _table("time to first token by length, ms", ("words", "tokens"), CONTENDERS)
    for point in points:
        cells = (spread(point.times[name]) for name in CONTENDERS)
        table.add_row(f"{point.words:,}", f"{point.num_tokens:,}", *cells)
    return table


def peers_table(rows: Sequence[PeerTime]) -> Table:
    table = _table(
        "engines behind the same pipe: time to first token, ms",
        ("engine", "tokens"),
        ("cold", "warm", "cold ÷ warm", "known tokens reused"),
    )
    for row in sorted(rows, key=lambda row: row.num_tokens):
        table.add_row(
            row.name,
            f"{row.num_tokens:,}",
            spread(row.cold),
            spread(row.warm),
            f"{row.cold.median_ms / row.warm.median_ms:.1f}",
            "–" if row.reused_share is None else f"{row.reused_share:.0%}",
        )
    return table


def chat_table(chat: Chat) -> Table:
    """From turn 2 on: the first has nothing to reuse."""
    turns = range(2, len(chat.prompt_tokens) + 1)
    table = _table(
        "a conversation, ms to the first token of each turn "
        f"({chat.prompt_tokens[0]:,} to {chat.prompt_tokens[-1]:,} tokens)",
        ("turn",),
        (*map(str, turns), f"{LATE} ÷ {EARLY}"),
    )
    for name, samples in chat.turns.items():
        growth = chat.growth(name)
        cells = (f"{samples[turn - 1].median_ms:.0f}" for turn in turns)
        table.add_row(name, *cells, "–" if growth is None else f"{growth:.2f}")
    return table


def show_break_evens(console: Console, found: Mapping[str, int | None], shortest: int) -> None:
    """``shortest`` is the shortest length that was measured."""
    for name, tokens in found.items():
        if tokens is None:
            said = "not at any length measured"
        elif tokens == shortest:
            said = f"at {tokens:,} tokens already, the shortest measured"
        else:
            said = f"from {tokens:,} tokens on"
        console.print(f"{name}: faster than reading everything {said}", highlight=False)


def show_clock(console: Console, checks: Mapping[str, ClockCheck]) -> None:
    for name, check in checks.items():
        mark = "[green]right[/]" if check.agrees else "[red]wrong[/]"
        console.print(
            f"our clock, {name}: {mark} (reported {check.reported_ms:.1f} ms, outside "
            f"{check.outside_ms:.1f} ms, {check.difference:+.1%})",
            highlight=False,
        )


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
