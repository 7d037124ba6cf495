"""The fault run in a short form: each fault a few times, and a fault that is not survived."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.faults import calls, storage
from benchmarks.faults import run as faults
from benchmarks.faults.case import Case, NotHere, expect

FAULTS = [
    (storage.killed_writers, 1),
    (storage.read_only_folder, 1),
    (storage.full_disk, 1),
    (storage.killed_redis, 1),
    (calls.forked_child, 2),
    (calls.interrupted, 2),
    (calls.joins_and_cancels, 20),
]


@pytest.fixture(autouse=True)
def one_core() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("fault", "times"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_fault_changes_no_answer_and_leaves_no_damage(fault, times, tmp_path: Path) -> None:
    case = Case(fault.__name__)
    try:
        fault(case, times, tmp_path / "kv")
    except NotHere as missing:
        pytest.skip(str(missing))
    assert case.failures == []
    assert case.tried >= times


def test_a_failed_attempt_is_counted_and_the_next_one_is_made() -> None:
    def fault(case: Case, times: int, folder: Path) -> None:
        for number in range(times):
            with case.trial():
                expect(number != 1, "the second one")
        raise OSError("the folder is gone")

    case = faults.attempt("broken", fault, 3)
    assert (case.tried, case.passed) == (4, 2)
    assert case.failures == ["attempt 2: the second one", "OSError: the folder is gone"]


def test_what_cannot_be_tried_here_says_why_and_is_no_failure() -> None:
    def fault(case: Case, times: int, folder: Path) -> None:
        with case.trial():
            raise NotHere("there is no Redis")

    case = faults.attempt("remote", fault, 3)
    assert (case.tried, case.failures, case.note) == (0, [], "not tried: there is no Redis")
