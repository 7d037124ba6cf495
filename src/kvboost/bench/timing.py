"""Interleaved measurement: every contender once per round, medians over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """Something to time: ``run(round)``. ``after`` tidies up and is not timed."""

    run: Callable[[int], object]
    after: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Sample:
    """Milliseconds over the rounds of one run."""

    median_ms: float
    min_ms: float
    max_ms: float

    @classmethod
    def of(cls, values: list[float]) -> Sample:
        return cls(statistics.median(values), min(values), max(values))


def interleave(
    contenders: Mapping[str, Contender], rounds: int, on_round: Callable[[], None] = lambda: None
) -> dict[str, Sample]:
    """Times every contender once per round, so that a slow moment of the machine meets them all.
    Round 0 warms up and is not counted. Each second round runs in the opposite order."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        names = list(contenders)
        for name in names if round_number % 2 else reversed(names):
            contender = contenders[name]
            start = time.perf_counter()
            contender.run(round_number)
            elapsed = (time.perf_counter() - start) * 1e3
            contender.after()
            if round_number:
                times[name].append(elapsed)
        on_round()
    return {name: Sample.of(values) for name, values in times.items()}
