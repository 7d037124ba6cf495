"""When running answers must go on."""

from __future__ import annotations

from kvboost.runtime.scheduler import LEAST_SLICE, QUICK_ROWS, Patience
from support.clock import Clock


class Costs:
    """A row takes 10 ms, and one more for each 1,000 keys; nothing is known if ``measured`` is
    false."""

    def __init__(self, measured: bool = True) -> None:
        self._measured = measured

    def rows_within(self, seconds: float, keys: int) -> int | None:
        return int(seconds / (0.01 + keys * 1e-6)) if self._measured else None


def layers_until_over(patience: Patience, clock: Clock, seconds: float) -> int:
    """How many layers of ``seconds`` run before answers must go on."""
    for number in range(1000):
        if patience.is_over():
            return number
        clock.now += seconds
    raise AssertionError("never")


def test_answers_go_on_before_a_layer_would_make_them_wait_too_long() -> None:
    clock = Clock()
    patience = Patience(0.25, Costs(), clock)
    clock.now += 0.05
    patience.answered(began=100.0)  # a step of 50 ms
    ran = layers_until_over(patience, clock, 0.03)
    waited = ran * 0.03
    assert waited + 0.05 <= 0.25 < waited + 0.03 + 0.03 + 0.05


def test_after_each_step_the_wait_begins_anew() -> None:
    clock = Clock()
    patience = Patience(0.2, Costs(), clock)
    for _ in range(3):
        assert layers_until_over(patience, clock, 0.02) > 5
        began = clock.now
        clock.now += 0.01
        patience.answered(began)


def test_layers_that_take_longer_than_a_pause_let_answers_go_on_each_time() -> None:
    clock = Clock()
    patience = Patience(0.2, Costs(), clock)
    for _ in range(4):
        assert layers_until_over(patience, clock, 0.5) <= 1
        patience.answered(clock.now)


def test_rows_are_those_that_are_done_in_time() -> None:
    patience = Patience(0.5, Costs())
    assert patience.slice_rows(2048, keys=0) == 32  # 50 would be done, too
    assert patience.slice_rows(2048, keys=-9_000) == 256  # of 500
    assert patience.slice_rows(40, keys=0) == 40
    assert patience.slice_rows(20, keys=1_000_000) == 20
    assert patience.slice_rows(2048, keys=1_000_000) == LEAST_SLICE
    assert patience.allows(50, keys=0) and not patience.allows(51, keys=0)
    assert patience.allows(QUICK_ROWS, keys=1_000_000)


def test_nothing_is_slow_for_certain_before_it_was_measured_or_without_a_limit() -> None:
    for patience in (Patience(0.5, Costs(measured=False)), Patience(0.0, Costs())):
        assert patience.slice_rows(2048, keys=0) == 2048
    assert not Patience(0.5, Costs(measured=False)).allows(51, keys=0)
    assert not Patience(0.0, Costs()) and Patience(0.5, Costs())


def test_the_longer_of_the_two_parts_of_a_layer_decides() -> None:
    clock = Clock()
    patience = Patience(0.25, Costs(), clock)
    for seconds in (0.12, 0.02):
        assert not patience.is_over()
        clock.now += seconds
    assert patience.is_over()  # the next part is a long one again


def test_a_forward_goes_on_for_as_long_as_a_step_of_the_answers_however_long_that_is() -> None:
    clock = Clock()
    patience = Patience(0.2, Costs(), clock)
    for _ in range(5):
        began = clock.now
        clock.now += 0.3
        patience.answered(began)
        assert 0.27 <= 0.03 * (layers_until_over(patience, clock, 0.03) + 1) <= 0.33
