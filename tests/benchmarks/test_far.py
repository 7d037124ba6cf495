"""The benchmark of far rows: a tiny shape takes its path on a CPU; goals are judged by figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import far
from benchmarks.entries import BENCHMARKS
from support.tiny import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has more to measure")
def test_a_tiny_shape_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "CHECKED", 200)
    monkeypatch.setattr(far, "MOST_STEPS", 4)
    console = Console(record=True, width=140)
    settings = BENCHMARKS["far"].settings(shape="tiny", tokens=640, near="64KiB")
    record = BENCHMARKS["far"].perform(settings, console, plot=tmp_path / "far.png")
    assert "problems" not in record
    assert record["near_rows"] == 128 and record["far_bytes"] == 640 * 512
    assert record["tokens_per_s"]["both"] > 0 and record["read_tokens_per_s"] > 0
    assert record["apart"] < 1e-5
    assert record["answers"] == {"alike": 8, "of": 8, "cached": 639, "requests": 2}
    assert record["limits"]["ram_bytes_per_s"] > 0
    shown = console.export_text()
    assert "limit of RAM" in shown and "transformers' offloaded cache needs a GPU" in shown


def test_goals_are_judged_by_the_better_limit() -> None:
    found: dict[str, Any] = {
        "tokens_per_s": {far.BOTH: 8.0, far.STOCK: 0.5},
        "limits": {"ram_bytes_per_s": 10.0, "bus_bytes_per_s": 4.0},
        "peak_bytes": 9 << 30,
    }
    goals = far.goals_of(far.Settings(), found)
    assert [goal.met for goal in goals] == [True, True, False]
    assert [goal.figure for goal in goals] == ["1.25 ×", "16.0 ×", "9GiB"]
    smaller = far.goals_of(far.Settings(tokens=1024), found)
    assert {goal.met for goal in smaller} == {None}
