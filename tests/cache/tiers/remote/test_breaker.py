from __future__ import annotations

from typing import Any

import pytest

from kvboost.cache.tiers.remote.breaker import Breaker
from kvboost.cache.tiers.remote.fsspec import FsspecBackend
from kvboost.cache.tiers.remote.tier import RemoteTier
from support.chunks import ROOT
from support.clock import Clock


def call(breaker: Breaker, succeeds: bool) -> bool:
    """Whether a call was let through."""
    entered = breaker.enter()
    if entered is None:
        return False
    breaker.leave(entered, succeeds)
    return True


def trip(breaker: Breaker) -> None:
    for _ in range(3):
        call(breaker, False)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock=clock)


def test_a_breaker_opens_only_after_consecutive_failures(breaker: Breaker) -> None:
    for succeeds in (False, False, True, False, False):
        assert call(breaker, succeeds)
    assert breaker.state == "closed"
    assert call(breaker, False)
    assert breaker.state == "open"
    assert not call(breaker, True)


def test_pauses_double_up_to_the_longest_and_start_again_after_success(
    clock: Clock, breaker: Breaker
) -> None:
    trip(breaker)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        clock.now += pause - 0.01
        assert (breaker.state, call(breaker, False)) == ("open", False)
        clock.now += 0.01
        assert breaker.state == "half-open"
        assert call(breaker, False)
    clock.now += 30
    assert call(breaker, True)
    assert breaker.state == "closed"
    for _ in range(3):
        assert call(breaker, False)
    clock.now += 1
    assert breaker.state == "half-open"


def test_one_trial_at_a_time(clock: Clock, breaker: Breaker) -> None:
    trip(breaker)
    clock.now += 1
    trial = breaker.enter()
    assert trial is not None
    assert breaker.enter() is None
    clock.now += 100  # a trial may take its time
    assert (breaker.state, breaker.enter()) == ("half-open", None)
    breaker.leave(trial, True)
    assert (breaker.state, call(breaker, True)) == ("closed", True)


def test_results_of_calls_from_before_a_change_are_ignored(clock: Clock, breaker: Breaker) -> None:
    early = [breaker.enter() for _ in range(5)]
    trip(breaker)
    clock.now += 1
    trial = breaker.enter()
    for entered in early:
        assert entered is not None
        breaker.leave(entered, False)
    assert trial is not None
    breaker.leave(trial, True)
    assert breaker.state == "closed"


def test_an_interrupted_trial_counts_as_failed(clock: Clock, breaker: Breaker) -> None:
    trip(breaker)
    clock.now += 1

    class Interrupted(FsspecBackend):
        def get(self, key: Any, most_bytes: int | None = None) -> bytes | None:
            raise KeyboardInterrupt

    tier = RemoteTier(Interrupted("memory://x", 1, timeout=1), breaker)
    with pytest.raises(KeyboardInterrupt):
        tier.get(ROOT)
    assert breaker.state == "open"
    clock.now += 2
    assert call(breaker, True)
