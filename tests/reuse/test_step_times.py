"""What decode steps cost, by their number of rows."""

from __future__ import annotations

import pytest

from kvboost.reuse.step_times import FIXED_ROWS, KEPT, LEAST, MOST_ROWS, RECENT, StepTimes, rising


def test_a_busy_machine_changes_little() -> None:
    times = StepTimes()
    for _ in range(6):
        times.observe(1, 1.0)
    for _ in range(3):
        times.observe(1, 5.0)
    assert times.time(1, float) == 1.0


def test_old_times_are_forgotten() -> None:
    times = StepTimes()
    for seconds in (1.0, 2.0):
        for _ in range(KEPT):
            times.observe(1, seconds)
    assert times.time(1, float) == 2.0


def test_more_rows_take_no_less_time() -> None:
    times = StepTimes()
    for rows, seconds in ((1, 1.0), (2, 3.0), (3, 2.0), (9, 4.0)):
        times.observe(rows, seconds)
    found = [times.time(rows, float) for rows in range(1, 10)]
    assert found == sorted(found) and found[1] == found[2] == 2.5


def test_one_busy_moment_is_not_trusted() -> None:
    times = StepTimes()
    for _ in range(LEAST):
        times.observe(1, 1.0)
    times.observe(2, 9.0)
    assert times.time(2, lambda rows: 99.0 + rows) == pytest.approx(101 / 100)
    for _ in range(LEAST - 1):
        times.observe(2, 1.5)
    assert times.time(2, lambda rows: 99.0 + rows) == 1.5


def test_what_is_not_seen_any_more_is_forgotten() -> None:
    times = StepTimes()
    for _ in range(LEAST):
        times.observe(2, 9.0)
    for _ in range(RECENT):
        times.observe(1, 1.0)
    assert times.time(2, lambda rows: 99.0 + rows) == pytest.approx(101 / 100)


def test_other_sizes_change_as_forwards_do() -> None:
    times = StepTimes()
    assert times.time(3, lambda rows: 7.0 * rows) == 21.0
    times.observe(4, 2.0)
    times.observe(8, 3.0)
    times.observe(MOST_ROWS + 1, 100.0)  # no decode step
    assert times.time(6, float) == pytest.approx(2.5)
    assert times.time(2, float) == pytest.approx(1.0)
    assert times.time(16, lambda rows: 92.0 + rows) == pytest.approx(3.0 * 108 / 100)


def test_sizes_that_were_not_seen_are_tried() -> None:
    times = StepTimes()
    for _ in range(LEAST):
        times.observe(8, 1.0)
    dear = times.time(16, float)
    assert dear == pytest.approx((FIXED_ROWS + 16) / (FIXED_ROWS + 8)) and dear < 2.0
    for _ in range(LEAST):
        times.observe(16, 2.0)
    assert times.time(16, float) == 2.0 and times.time(12, float) == 1.5


def test_what_falls_becomes_its_mean_by_weight() -> None:
    assert rising([1.0, 4.0, 1.0, 5.0], [1, 1, 2, 1]) == [1.0, 2.0, 2.0, 5.0]
    assert rising([3.0, 2.0, 1.0], [1, 1, 1]) == [2.0, 2.0, 2.0]
