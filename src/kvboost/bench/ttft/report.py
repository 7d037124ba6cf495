"""Times to first token: tables, goals and the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.figures import INK, Figure, Lines, draw_lines
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.tables import dim, ms, percent, spread, table
from kvboost.bench.peers.engines import PEERS, STOCK, colours
from kvboost.bench.peers.servers import OURS, PREFIX
from kvboost.bench.ttft.chat import EARLY, LATE, Chat
from kvboost.bench.ttft.patterns import CONTENDERS, TOGETHER, TTFT, Decode, Pooled
from kvboost.bench.ttft.peers import PeerTime

WIDE = 110
AT_TOKENS = 2048
FASTER = 8.0
FASTER_MOVED = 3.0
FASTER_TOGETHER = 3.0
FLAT = 1.3
STOCK_GOAL, PEERS_GOAL, MOVED_GOAL, CHAT_GOAL, DECODE_GOAL = BENCHMARKS["ttft"].goals
MEANINGS = dim(
    """stock     full prefill by stock transformers
baseline  ours without reuse
warm      ours, everything but the new tokens read before (prefix cache, exact)
chunk     ours, the same text after other words than when it was read (moved, repaired)
floor     stock transformers with the KV already in its cache"""
)
LABELS = {
    "stock": "stock",
    "baseline": "KVBoost, no reuse",
    "warm": "KVBoost, exact prefix",
    "chunk": "KVBoost, moved text",
    "floor": "floor: stock, KV already there",
}
COLD = ", cold"


def ttft_table(rows: Sequence[TTFT], width: int = WIDE) -> Table:
    """Medians only where ``width`` has no room for more."""
    told = ms if width < WIDE else spread
    more = "" if width < WIDE else "; lowest to highest in brackets"
    return table(
        f"time to first token, ms (median{more})",
        ("pattern", "tokens"),
        ("stock", "baseline", "÷ stock", "warm", "chunk", "floor", "÷ floor", "faster"),
        [
            (
                row.pattern,
                f"{row.num_tokens:,}",
                *(told(row.stock), told(row.baseline), f"{row.baseline_over_stock:.2f}"),
                *(told(row.warm), told(row.chunk), told(row.floor)),
                *(f"{row.warm_over_floor:.2f}", f"{row.speedup:.1f} ×"),
            )
            for row in rows
        ],
    )


def pooled_table(rows: Sequence[Pooled]) -> Table:
    return table(
        "all patterns together",
        ("tokens",),
        ("baseline ÷ stock", "warm ÷ floor", "warm faster than stock", "chunk faster"),
        [
            (
                f"{row.num_tokens:,}",
                *(f"{row.baseline_over_stock:.2f}", f"{row.warm_over_floor:.2f}"),
                *(f"{row.speedup:.1f} ×", f"{row.chunk_speedup:.1f} ×"),
            )
            for row in rows
        ],
    )


def decode_table(row: Decode) -> Table:
    return table(
        "ms per generated token, whole call over a known prompt",
        ("prompt tokens",),
        ("stock generate", "ours", "÷ stock", f"ours, {TOGETHER} at once", "faster"),
        [
            (
                *(f"{row.num_tokens:,}", spread(row.stock)),
                *(spread(row.ours), f"{row.ours_over_stock:.2f}"),
                *(spread(row.together), f"{row.together_gain:.1f} ×"),
            )
        ],
    )


def peers_table(rows: Sequence[PeerTime]) -> Table:
    return table(
        "engines, each in its own process: time to first token, ms",
        ("engine", "tokens"),
        ("cold", "warm", "moved", "reordered", "known tokens reused"),
        [
            (
                *(row.name, f"{row.num_tokens:,}"),
                *map(ms, (row.cold, row.warm, row.moved, row.reordered)),
                ", ".join(map(percent, row.reused.values())),
            )
            for row in sorted(rows, key=lambda row: row.num_tokens)
        ],
    )


def chat_table(chat: Chat) -> Table:
    """From turn 2: the first has nothing to reuse."""
    first, last = chat.prompt_tokens[0], chat.prompt_tokens[-1]
    growths = {name: chat.growth(name) for name in chat.turns}
    return table(
        f"a conversation, ms to the first token of each turn ({first:,} to {last:,} tokens)",
        ("turn",),
        (*(str(turn) for turn in range(2, len(chat.prompt_tokens) + 1)), f"{LATE} ÷ {EARLY}"),
        [
            (
                name,
                *(f"{sample.median_ms:.0f}" for sample in samples[1:]),
                "–" if growths[name] is None else f"{growths[name]:.2f}",
            )
            for name, samples in chat.turns.items()
        ],
    )


def break_even_lines(found: Mapping[str, int | None], shortest: int) -> Iterator[str]:
    """``shortest`` is the shortest length that was measured."""
    for name, tokens in found.items():
        if tokens is None:
            told = "not at any measured length"
        elif tokens == shortest:
            told = f"at {tokens:,} tokens already, the shortest measured"
        else:
            told = f"from {tokens:,} tokens"
        yield f"{name}: faster than reading everything {told}"


def faster_than_stock(pooled: Sequence[Pooled]) -> Goal:
    """Judged at ``AT_TOKENS``; at another length the figure is given and not judged."""
    at = _nearest([row.num_tokens for row in pooled])
    row = next(row for row in pooled if row.num_tokens == at)
    met = row.speedup >= FASTER if at == AT_TOKENS else None
    return Goal(STOCK_GOAL, met, f"{row.speedup:.1f} × at {at:,} tokens")


def faster_than_peers(peers: Sequence[PeerTime]) -> Goal:
    at, rows = _at_goal(peers)
    warm = {name: row.warm.median_ms for name, row in rows.items()}
    ours = warm.get(PREFIX, warm.get(OURS))
    others = {name: time for name, time in warm.items() if name in PEERS}
    if ours is None or not others:
        return Goal(PEERS_GOAL, None, "no peer was measured; add --peers")
    told = ", ".join(f"{name} {time / ours:.2f} ×" for name, time in others.items())
    if STOCK in rows:
        told += f"; stock {rows[STOCK].cold.median_ms / ours:.1f} ×"
    met = min(others.values()) > ours if at == AT_TOKENS else None
    return Goal(PEERS_GOAL, met, f"their time over our {ours:.0f} ms at {at:,} tokens: {told}")


def faster_on_moved(peers: Sequence[PeerTime]) -> Goal:
    at, rows = _at_goal(peers)
    others = [row for name, row in rows.items() if name in PEERS]
    if OURS not in rows or not others:
        return Goal(MOVED_GOAL, None, "no peer was measured; add --peers")
    found = []
    for place in ("moved", "reordered"):
        best = min(others, key=lambda row: getattr(row, place).median_ms)
        ratio = getattr(best, place).median_ms / getattr(rows[OURS], place).median_ms
        found.append((ratio, f"{place} {ratio:.1f} × ({best.name})"))
    met = min(ratio for ratio, _ in found) >= FASTER_MOVED if at == AT_TOKENS else None
    return Goal(MOVED_GOAL, met, f"at {at:,} tokens: {', '.join(told for _, told in found)}")


def faster_together(decode: Decode) -> Goal:
    gain = decode.together_gain
    return Goal(DECODE_GOAL, gain >= FASTER_TOGETHER, f"{gain:.1f} × with {TOGETHER} at once")


def flat_chat(chat: Chat) -> Goal:
    found = {name: chat.growth(name) for name in ("prefix", "chunk")}
    known = {name: growth for name, growth in found.items() if growth is not None}
    if len(known) < len(found):
        return Goal(CHAT_GOAL, None, f"fewer than {LATE} turns")
    told = ", ".join(f"{name} {growth:.2f} ×" for name, growth in known.items())
    return Goal(CHAT_GOAL, max(known.values()) <= FLAT, told)


def _at_goal(peers: Sequence[PeerTime]) -> tuple[int, dict[str, PeerTime]]:
    """The length that is judged, and every engine there."""
    at = _nearest([row.num_tokens for row in peers if row.name in PEERS])
    return at, {row.name: row for row in peers if row.num_tokens == at}


def _nearest(lengths: Sequence[int]) -> int:
    """``AT_TOKENS`` if it was measured, else the longest."""
    return AT_TOKENS if AT_TOKENS in lengths else max(lengths, default=0)


def ttft_figure(points: Sequence[TTFT], peers: Sequence[PeerTime], title: str) -> Figure:
    """By length: our contenders in one process, and engines in theirs. Cold lines are dashed, in
    the colour of their engine."""
    panels: dict[str, Lines] = {
        "in one process": {
            LABELS[name]: [(point.num_tokens, getattr(point, name)) for point in points]
            for name in CONTENDERS
        }
    }
    names = list(dict.fromkeys(row.name for row in peers))
    styles: dict[str, dict[str, object]] = {LABELS["stock"]: {"color": INK}}
    looks = colours(names)
    for name in names:
        styles[name] = {"color": looks[name], "linewidth": 2.4 if name == OURS else 1.5}
        styles[name + COLD] = {**styles[name], "linestyle": "--", "alpha": 0.6}
        if name != STOCK:  # stock keeps nothing, so it has no other line
            styles[name + COLD]["label"] = f"_{name}{COLD}"
    if names:
        panels["engines: warm prefix; dashed: all to be read"] = {
            f"{name}{kind}": [
                (row.num_tokens, row.cold if kind else row.warm)
                for row in peers
                if row.name == name
            ]
            for name in names
            for kind in ((COLD,) if name == STOCK else ("", COLD))
        }
        panels["engines: known documents in another order"] = {
            name: [(row.num_tokens, row.reordered) for row in peers if row.name == name]
            for name in names
        }
    y = "time to first token, ms"
    return draw_lines(panels, title=title, x="prompt, tokens", y=y, log_x=True, styles=styles)
