"""Engines behind the pipe, each cold (nothing of a prompt known) and warm (all but its end)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvboost.bench.peers.crew import Crew
from kvboost.bench.timing import Sample, take_turns
from kvboost.bench.ttft.lengths import break_even
from kvboost.bench.workloads import PATTERNS, Encode, Unread, question

PATTERN = "rag"
LENGTHS = (256, 512, 1024, 2048, 4096)
SLOW_MS = 10_000.0
"""Whoever takes longer to read a prompt is not given longer ones."""


@dataclass(frozen=True)
class PeerTime:
    """One engine at one length."""

    name: str
    num_tokens: int
    cold: Sample
    warm: Sample
    reused_share: float | None
    """Of the known tokens, when warm; None where the engine does not tell."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure_peers(
    crew: Crew,
    encode: Encode,
    lengths: Sequence[int] = LENGTHS,
    num_new: int = 32,
    rounds: int = 3,
    on_round: Callable[[], None] = lambda: None,
) -> list[PeerTime]:
    """Before a warm prompt is timed, its beginning is read with another end: whoever keeps one
    prompt only has kept this one."""
    unread = Unread(encode)
    found: list[PeerTime] = []
    slow: set[str] = set()
    for length in sorted(lengths):
        shared = PATTERNS[PATTERN].shared(encode, length - num_new)
        new = [unread.take(length) for _ in range(rounds + 1)]
        reused: dict[str, list[int]] = {}
        timers: dict[str, Callable[[int], float | None]] = {}
        for name in crew.names:
            if name not in slow:
                timers[f"{name} cold"] = _cold(crew, name, new)
                timers[f"{name} warm"] = _warm(crew, name, shared, encode, num_new, reused)
        times = take_turns(timers, rounds, on_round)
        for name in crew.names:  # those that failed on the way are not among them
            if f"{name} cold" in times:
                cold, warm = times[f"{name} cold"], times[f"{name} warm"]
                share = min(reused[name]) / len(shared) if name in reused else None
                found.append(PeerTime(name, length, cold, warm, share))
                if cold.median_ms > SLOW_MS:
                    slow.add(name)
    return found


def peer_break_evens(rows: Sequence[PeerTime]) -> dict[str, int | None]:
    """Tokens from which each engine's own reuse beats its own full reading; not of those that
    say that they reused nothing."""
    names = dict.fromkeys(row.name for row in rows if row.reused_share != 0)
    return {
        name: break_even(
            {row.num_tokens: row.cold.median_ms for row in rows if row.name == name},
            {row.num_tokens: row.warm.median_ms for row in rows if row.name == name},
        )
        for name in names
    }


def _cold(crew: Crew, name: str, new: Sequence[list[int]]) -> Callable[[int], float | None]:
    def timer(number: int) -> float | None:
        answer = crew.ask(name, new[number])
        return None if answer is None else answer.ttft_ms

    return timer


def _warm(
    crew: Crew,
    name: str,
    shared: list[int],
    encode: Encode,
    num_new: int,
    reused: dict[str, list[int]],
) -> Callable[[int], float | None]:
    def timer(number: int) -> float | None:
        before, now = (question(encode, 2 * number + one, num_new) for one in (0, 1))
        crew.ask(name, shared + before)
        answer = crew.ask(name, shared + now)
        if answer is None:
            return None
        if answer.cached_tokens is not None:
            reused.setdefault(name, []).append(min(answer.cached_tokens, len(shared)))
        return answer.ttft_ms

    return timer
