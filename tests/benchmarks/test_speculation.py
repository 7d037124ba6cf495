"""The benchmark of drafts runs, and compares the same answers."""

from __future__ import annotations

import json

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
