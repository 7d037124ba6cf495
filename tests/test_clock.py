"""``result.ttft_ms`` is the time a caller waits: our clock against one outside."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from kvboost import GenerationMode, KVBoost
from kvboost.results import Clock, Timings
from support.tiny import make_engine, tiny_model

TOLERANCE = 0.02
TOLERANCE_MS = 2.0
"""Whichever is more."""


@dataclass(frozen=True)
class ClockCheck:
    """Milliseconds from the call until the caller had the first token's text."""

    reported_ms: float
    outside_ms: float

    @property
    def agrees(self) -> bool:
        allowed = max(TOLERANCE * self.outside_ms, TOLERANCE_MS)
        return abs(self.reported_ms - self.outside_ms) <= allowed


def check_clock(
    engine: KVBoost, prompt: list[int], mode: GenerationMode = GenerationMode.BASELINE
) -> ClockCheck:
    """The try of five in which both clocks agree best. A try that is interrupted between their
    readings says nothing, and a clock that is wrong is wrong every time."""
    seen = [_read_both(engine, prompt, mode) for _ in range(5)]
    return min(seen, key=lambda check: abs(check.reported_ms - check.outside_ms))


def _read_both(engine: KVBoost, prompt: list[int], mode: GenerationMode) -> ClockCheck:
    plain = engine.encode("a")[-1]  # the first token's text must not wait for the second's
    start = time.perf_counter()
    stream = engine.stream(
        prompt, 2, mode, cache_salt="clock", keep=False, logit_bias={plain: 100.0}
    )
    next(stream)
    outside = time.perf_counter() - start
    for _ in stream:
        pass
    return ClockCheck(stream.result.ttft_ms, outside * 1e3)


PROMPT = [n * 7 % 250 for n in range(2_000)]


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    model = tiny_model("llama", max_position_embeddings=8192)
    with make_engine(model, chunk_size=128) as made:
        made.warm(PROMPT[:1_000], cache_salt="clock")
        yield made


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_we_report_is_what_a_caller_waits(engine: KVBoost, mode: GenerationMode) -> None:
    check = check_clock(engine, PROMPT, mode)
    assert check.outside_ms > 10
    assert check.agrees, check


def test_a_clock_that_starts_late_is_caught(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Clock.timings

    def late(clock: Clock) -> Timings:
        found = honest(clock)
        return replace(found, ttft_ms=found.ttft_ms * 0.5)

    monkeypatch.setattr(Clock, "timings", late)
    assert not check_clock(engine, PROMPT).agrees


@pytest.mark.parametrize(
    ("reported", "outside", "agrees"),
    [
        (565.0, 2295.0, False),  # seen in the wild: started after lookup and repair
        (2250.0, 2295.0, True),
        (2240.0, 2295.0, False),
        (2345.0, 2295.0, False),  # nor may it say more
        (8.5, 10.0, True),  # two milliseconds are the noise of a call
        (7.5, 10.0, False),
    ],
)
def test_two_percent_or_two_milliseconds(reported: float, outside: float, agrees: bool) -> None:
    assert ClockCheck(reported, outside).agrees is agrees
