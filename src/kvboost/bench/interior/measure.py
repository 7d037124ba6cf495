"""Every engine on every prompt, in turns; how long, and how much of the known text was reused."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvboost.bench.goals import Goal
from kvboost.bench.interior.prompts import INTERIOR, PLACES, Round
from kvboost.bench.peers.crew import Crew
from kvboost.bench.peers.engines import OURS, OURS_PREFIX
from kvboost.bench.timing import Sample

PEER_SECONDS = 240.0
"""Whoever has used up so much time is not asked in later rounds, so that a run ends."""
AT_TOKENS = 2048
FASTER = 3.0


@dataclass(frozen=True)
class Row:
    """One engine at one place of the documents."""

    engine: str
    place: str
    num_tokens: int
    ttft: Sample
    rounds: int
    reused_share: float | None
    """Of the tokens that were read before, those it did not compute; None where it cannot tell."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class _Seen:
    ttft_ms: float
    num_tokens: int
    share: float | None


def measure_interior(
    crew: Crew,
    rounds: Sequence[Round],
    *,
    most_seconds: float = PEER_SECONDS,
    on_round: Callable[[], None] = lambda: None,
) -> list[Row]:
    """In each round everyone reads the documents (not timed), then everyone is asked the same
    prompt, place by place. The first round warms up and does not count."""
    seen: dict[tuple[str, str], list[_Seen]] = defaultdict(list)
    spent: dict[str, float] = defaultdict(float)
    for number, one in enumerate(rounds):
        names = [name for name in crew.names if spent[name] <= most_seconds]
        for name in names:
            answer = crew.ask(name, one.read)
            spent[name] += answer.total_ms / 1e3 if answer else 0.0
        for at, (place, prompt) in enumerate(one.prompts.items()):
            for name in names if (number + at) % 2 else reversed(names):
                answer = crew.ask(name, prompt.ids)
                if answer is None:
                    continue
                spent[name] += answer.total_ms / 1e3
                if number:
                    told = answer.cached_tokens
                    share = None if told is None else min(1.0, told / prompt.known_tokens)
                    seen[name, place].append(_Seen(answer.ttft_ms, len(prompt.ids), share))
        on_round()
    return [
        _row(name, place, seen[name, place])
        for place in PLACES
        for name in crew.described
        if seen[name, place] and name not in crew.failures
    ]


def _row(engine: str, place: str, seen: Sequence[_Seen]) -> Row:
    shares = [one.share for one in seen if one.share is not None]
    return Row(
        engine,
        place,
        round(statistics.median(one.num_tokens for one in seen)),
        Sample.of([one.ttft_ms for one in seen]),
        len(seen),
        statistics.median(shares) if shares else None,
    )


def against_best(rows: Sequence[Row]) -> dict[str, tuple[str, float]]:
    """By place: the fastest of the others, and how many times our time it took."""
    found = {}
    for place in PLACES:
        times = {row.engine: row.ttft.median_ms for row in rows if row.place == place}
        others = {name: ms for name, ms in times.items() if name not in (OURS, OURS_PREFIX)}
        if OURS in times and others:
            best = min(others, key=lambda name: others[name])
            found[place] = best, others[best] / times[OURS]
    return found


def goal(best: Mapping[str, tuple[str, float]], tokens: int) -> Goal:
    """Judged on prompts of ``AT_TOKENS`` and longer: what is short is soon read."""
    text = (
        f"interior and reordered reuse at {AT_TOKENS:,} tokens at least {FASTER:g} × faster than "
        "the best peer"
    )
    chosen = {place: best[place] for place in INTERIOR if place in best}
    if not chosen:
        return Goal(text, None, "not measured")
    said = ", ".join(f"{place} {ratio:.1f} × ({name})" for place, (name, ratio) in chosen.items())
    met = min(ratio for _, ratio in chosen.values()) >= FASTER if tokens >= AT_TOKENS else None
    return Goal(text, met, f"at {tokens:,} tokens: {said}")
