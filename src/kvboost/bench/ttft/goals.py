"""What we want of the time to first token."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.bench.goals import Goal
from kvboost.bench.peers.engines import OURS, OURS_PREFIX, PEERS, STOCK
from kvboost.bench.ttft.chat import EARLY, LATE, Chat
from kvboost.bench.ttft.patterns import Pooled
from kvboost.bench.ttft.peers import PeerTime

AT_TOKENS = 2048
FASTER = 8.0
FLAT = 1.3


def goals(pooled: Sequence[Pooled], chat: Chat, peers: Sequence[PeerTime]) -> list[Goal]:
    """Judged at ``AT_TOKENS``; at another length the figure is given and nothing is judged."""
    return [faster_than_stock(pooled), faster_than_peers(peers), flat_chat(chat)]


def faster_than_stock(pooled: Sequence[Pooled]) -> Goal:
    at = _nearest([row.num_tokens for row in pooled])
    row = next(row for row in pooled if row.num_tokens == at)
    return Goal(
        f"exact hits at {AT_TOKENS:,} tokens at least {FASTER:g} × faster to first token than "
        "stock transformers",
        row.speedup >= FASTER if at == AT_TOKENS else None,
        f"{row.speedup:.1f} × at {at:,} tokens",
    )


def faster_than_peers(peers: Sequence[PeerTime]) -> Goal:
    text = f"exact hits at {AT_TOKENS:,} tokens faster than every peer's warm prefix"
    at = _nearest([row.num_tokens for row in peers if row.name in PEERS])
    warm = {row.name: row.warm.median_ms for row in peers if row.num_tokens == at}
    ours = warm.get(OURS_PREFIX, warm.get(OURS))
    others = {name: ms for name, ms in warm.items() if name in PEERS}
    if ours is None or not others:
        return Goal(text, None, "no peer was measured; add --peers")
    said = ", ".join(f"{name} {ms / ours:.2f} ×" for name, ms in others.items())
    if stock := next((r for r in peers if (r.name, r.num_tokens) == (STOCK, at)), None):
        said += f"; stock {stock.cold.median_ms / ours:.1f} ×"
    met = min(others.values()) > ours if at == AT_TOKENS else None
    return Goal(text, met, f"their time over our {ours:.0f} ms at {at:,} tokens: {said}")


def flat_chat(chat: Chat) -> Goal:
    text = f"chat turn {LATE} takes at most {FLAT:g} × as long as turn {EARLY}"
    found = {name: chat.growth(name) for name in ("prefix", "chunk")}
    if any(growth is None for growth in found.values()):
        return Goal(text, None, f"fewer than {LATE} turns")
    known = {name: growth for name, growth in found.items() if growth is not None}
    said = ", ".join(f"{name} {growth:.2f} ×" for name, growth in known.items())
    return Goal(text, max(known.values()) <= FLAT, said)


def _nearest(lengths: Sequence[int]) -> int:
    """``AT_TOKENS`` if it was measured, else the longest."""
    return AT_TOKENS if AT_TOKENS in lengths else max(lengths, default=0)
