"""When idle work may begin."""

from __future__ import annotations

from kvboost.runtime.healing import LEAST_SECONDS, MOST_SECONDS, Quiet
from support.clock import Clock


def idle(quiet: Quiet, clock: Clock, seconds: float) -> float:
    """Lets no request come for ``seconds``; returns how long work ran meanwhile."""
    quiet.broken()
    waited = quiet.seconds_left
    clock.now += seconds
    if waited > seconds:
        return 0.0
    quiet.used(interrupted=True)
    return seconds - waited


def test_work_begins_once_no_request_has_come_for_a_while() -> None:
    clock = Clock()
    quiet = Quiet(clock)
    quiet.broken()
    assert quiet.seconds_left == LEAST_SECONDS
    clock.now += LEAST_SECONDS / 2
    assert quiet.seconds_left == LEAST_SECONDS / 2
    clock.now += LEAST_SECONDS
    assert quiet.seconds_left == 0


def test_steady_traffic_is_not_disturbed_twice() -> None:
    clock = Clock()
    quiet = Quiet(clock)
    ran = [idle(quiet, clock, 0.4) for _ in range(20)]
    assert ran[0] > 0 and not any(ran[1:])


def test_longer_gaps_are_used() -> None:
    """While a client runs its tool, for instance."""
    clock = Clock()
    quiet = Quiet(clock)
    for _ in range(20):
        assert idle(quiet, clock, 2.0) > 1.0
    for _ in range(20):
        idle(quiet, clock, 0.4)
    assert [idle(quiet, clock, 2.0) > 1.0 for _ in range(20)].count(True) >= 19


def test_idle_work_never_waits_for_ever() -> None:
    clock = Clock()
    quiet = Quiet(clock)
    for power in range(12):
        idle(quiet, clock, LEAST_SECONDS * 2**power * 1.5)
    quiet.broken()
    assert LEAST_SECONDS <= quiet.seconds_left <= MOST_SECONDS
