"""Other engines, each cold (nothing of a prompt known) and warm (all but its end known)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost.bench.kit.timing import Sample, take_turns
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.speed.ttft.patterns import break_even
from kvboost.bench.texts.prompts import PATTERNS, Encode, Unread, question

PATTERN = "rag"
LENGTHS = (256, 512, 1024, 2048, 4096)
SLOW_MS = 10_000.0
"""An engine that takes longer to read a prompt is not given longer ones."""

Timer = Callable[[int], float | None]


@dataclass(frozen=True)
class PeerTime:
    """One engine at one length."""

    name: str
    num_tokens: int
    cold: Sample
    warm: Sample
    reused_share: float | None
    """Of the known tokens, when warm; None where the engine does not tell."""


def measure_peers(
    peers: Contenders,
    encode: Encode,
    lengths: Sequence[int] = LENGTHS,
    num_new: int = 32,
    rounds: int = 3,
    on_round: Callable[[], None] = lambda: None,
) -> list[PeerTime]:
    """Before a warm prompt is timed, its beginning is read with another end: an engine that keeps
    only one prompt has kept this one."""
    unread = Unread(encode)
    found: list[PeerTime] = []
    slow: set[str] = set()
    for length in sorted(lengths):
        shared = PATTERNS[PATTERN].shared(encode, length - num_new)
        new = [unread.take(length) for _ in range(rounds + 1)]
        ends = [question(encode, number, num_new) for number in range(2 * rounds + 2)]
        reused: dict[str, list[int]] = {}
        timers: dict[str, Timer] = {}
        for name in peers.names:
            if name not in slow:
                timers[f"{name} cold"] = _cold(peers, name, new)
                timers[f"{name} warm"] = _warm(peers, name, shared, ends, reused)
        times = take_turns(timers, rounds, on_round)
        for name in peers.names:  # one that failed on the way is not among them
            if f"{name} cold" in times:
                cold, warm = times[f"{name} cold"], times[f"{name} warm"]
                share = min(reused[name]) / len(shared) if name in reused else None
                found.append(PeerTime(name, length, cold, warm, share))
                if cold.median_ms > SLOW_MS:
                    slow.add(name)
    return found


def peer_break_evens(rows: Sequence[PeerTime]) -> dict[str, int | None]:
    """Tokens from which each engine's own reuse beats its own full reading; without those that
    report that they reused nothing."""
    names = dict.fromkeys(row.name for row in rows if row.reused_share != 0)
    return {
        name: break_even(
            {row.num_tokens: row.cold.median_ms for row in rows if row.name == name},
            {row.num_tokens: row.warm.median_ms for row in rows if row.name == name},
        )
        for name in names
    }


def _cold(peers: Contenders, name: str, new: Sequence[list[int]]) -> Timer:
    def timer(number: int) -> float | None:
        answer = peers.ask(name, new[number])
        return None if answer is None else answer.ttft_ms

    return timer


def _warm(
    peers: Contenders,
    name: str,
    shared: list[int],
    ends: Sequence[list[int]],
    reused: dict[str, list[int]],
) -> Timer:
    def timer(number: int) -> float | None:
        peers.ask(name, shared + ends[2 * number])
        answer = peers.ask(name, shared + ends[2 * number + 1])
        if answer is None:
            return None
        if answer.cached_tokens is not None:
            reused.setdefault(name, []).append(min(answer.cached_tokens, len(shared)))
        return answer.ttft_ms

    return timer
