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

    def per(self, count: float) -> Sample:
        """The share of one of ``count``."""
        return Sample(self.median_ms / count, self.min_ms / count, self.max_ms / count)


def interleave(
    contenders: Mapping[str, Contender], rounds: int, on_round: Callable[[], None] = lambda: None
) -> dict[str, Sample]:
    """Times every contender once per round, so that a slow moment of the machine affects them all.
    Round 0 warms up and is not counted. Every second round runs in the opposite order."""
    timers = {name: _stopwatch(contender) for name, contender in contenders.items()}
    return take_turns(timers, rounds, on_round)


def take_turns(
    timers: Mapping[str, Callable[[int], float | None]],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Sample]:
    """Like :func:`interleave`, for contenders that measure their own milliseconds. None does not
    count; a contender that gave nothing else is left out."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for round_number in range(rounds + 1):
        names = list(timers)
        for name in names if round_number % 2 else reversed(names):
            elapsed = timers[name](round_number)
            if round_number and elapsed is not None:
                times[name].append(elapsed)
        on_round()
    return {name: Sample.of(values) for name, values in times.items() if values}


def _stopwatch(contender: Contender) -> Callable[[int], float]:
    def timed(round_number: int) -> float:
        start = time.perf_counter()
        contender.run(round_number)
        elapsed = (time.perf_counter() - start) * 1e3
        contender.after()
        return elapsed

    return timed
