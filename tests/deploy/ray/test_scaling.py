"""When Ray Serve should add or remove a replica; no Ray is needed to say it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from kvboost.deploy.ray.options import DeployOptions
from kvboost.deploy.ray.scaling import autoscaling_stats, kv_pressure


def wanted(kv_used: list[float], waiting: list[float], now: int = 2) -> int:
    reported = {"kv_used": dict(enumerate(kv_used)), "waiting": dict(enumerate(waiting))}
    context = SimpleNamespace(
        current_num_replicas=now,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
        aggregated_metrics=reported,
    )
    return kv_pressure(context)[0]


@pytest.mark.parametrize(
    ("kv_used", "waiting", "replicas"),
    [
        ([0.9, 0.95], [0, 0], 3),
        ([0.9, 0.1], [0, 0], 2),  # the other one has room
        ([0.5, 0.5], [2, 1], 3),
        ([0.5, 0.5], [2, 0], 2),
        ([0.1, 0.0], [0, 0], 1),
        ([0.1, 0.0], [1, 0], 2),
        ([], [], 2),  # nothing reported yet
    ],
)
def test_all_full_adds_one_and_all_idle_removes_one(kv_used, waiting, replicas) -> None:
    assert wanted(kv_used, waiting) == replicas


def test_the_limits_hold() -> None:
    assert wanted([0.99] * 3, [5] * 3, now=3) == 3
    assert wanted([0.0], [0], now=1) == 1


def test_a_replica_reports_how_full_it_is() -> None:
    stats = {"kv_bytes": 30, "max_kv_bytes": 40, "waiting": 2}
    assert autoscaling_stats(stats) == {"kv_used": 0.75, "waiting": 2.0}
    assert autoscaling_stats({**stats, "max_kv_bytes": None})["kv_used"] == 0.0


def test_arguments_of_a_command_line_are_checked() -> None:
    given = DeployOptions(replicas="2", redis="redis://x", cpus="0.5", shared_cache="true")
    assert (given.replicas, given.cpus, given.shared_cache) == (2, 0.5, True)
    for wrong in ({"replica": 2}, {"replicas": 0}, {"replicas": 3, "max_replicas": 2}):
        with pytest.raises(ValidationError):
            DeployOptions(**wrong)
    with pytest.raises(ValidationError, match="choose one of 'content'"):
        DeployOptions(policy="best")
