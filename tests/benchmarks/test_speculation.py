"""The benchmark of drafts runs, and compares the same answers."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import speculation
from support.tiny import save_tiny


def test_the_benchmark_measures_every_task(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    save_tiny(tmp_path, max_position_embeddings=4096)
    assert all(task(number) for task in speculation.TASKS.values() for number in range(8))
    options = ["--rounds", "1", "--tokens", "6", "--users", "1", "2"]
    speculation.main(["--model", str(tmp_path), *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["task"], row["users"]) for row in report["tasks"]] == [
        (task, users) for users in (1, 2) for task in ("code edit", "quote", "chat")
    ]
    assert all(row["speedup"] > 0 and row["tokens"] <= 12 for row in report["tasks"])


def test_no_drafts_gain_more_than_rows_that_are_all_tokens() -> None:
    step_ms = {1: 10.0, 8: 16.0, 12: 18.0, 24: 40.0}
    assert speculation.most_gained(step_ms, 8) == pytest.approx(12 / 18 / (8 / 16))
    assert math.isnan(speculation.most_gained(step_ms, 4))
