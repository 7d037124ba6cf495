"""A wrong clock is caught: what we report against what a caller waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvboost import GenerationMode, KVBoost
from kvboost.bench.ttft.clock import ClockCheck, check_clock
from kvboost.results import Clock, Timings
from tiny import make_engine, tiny_model

PROMPT = [n * 7 % 250 for n in range(4_000)]


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    model = tiny_model("llama", max_position_embeddings=8192)
    with make_engine(model, chunk_size=128) as made:
        made.warm(PROMPT[:2_000], cache_salt="clock")
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
