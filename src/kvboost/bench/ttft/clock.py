"""Our own clock against one outside: what ``result.ttft_ms`` says must be what a caller waits."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from kvboost import GenerationMode, KVBoost

TOLERANCE = 0.02
TOLERANCE_MS = 2.0
"""Whichever is more."""


@dataclass(frozen=True)
class ClockCheck:
    """Milliseconds from the call until the first token's text was in the caller's hands."""

    reported_ms: float
    outside_ms: float

    @property
    def difference(self) -> float:
        """As a share of what the clock outside says; below zero if ours says less."""
        return self.reported_ms / self.outside_ms - 1.0

    @property
    def agrees(self) -> bool:
        allowed = max(TOLERANCE * self.outside_ms, TOLERANCE_MS)
        return abs(self.reported_ms - self.outside_ms) <= allowed

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "difference": self.difference, "agrees": self.agrees}


def check_clock(
    engine: KVBoost,
    prompt: list[int],
    mode: GenerationMode = GenerationMode.BASELINE,
    *,
    cache_salt: str = "clock",
    tries: int = 5,
) -> ClockCheck:
    """The try in which both clocks agree best: one that is interrupted between their readings says
    nothing, and a clock that is wrong is wrong every time."""
    seen = [_read_both(engine, prompt, mode, cache_salt) for _ in range(tries)]
    return min(seen, key=lambda check: abs(check.reported_ms - check.outside_ms))


def _read_both(
    engine: KVBoost, prompt: list[int], mode: GenerationMode, cache_salt: str
) -> ClockCheck:
    plain = engine.encode("a")[-1]  # the first token's text must not wait for the second's
    start = time.perf_counter()
    stream = engine.stream(
        prompt, 2, mode, cache_salt=cache_salt, keep=False, logit_bias={plain: 100.0}
    )
    next(stream)
    outside = time.perf_counter() - start
    for _ in stream:
        pass
    return ClockCheck(stream.result.ttft_ms, outside * 1e3)
