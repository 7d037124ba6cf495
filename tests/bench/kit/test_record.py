from __future__ import annotations

import json
import subprocess
from pathlib import Path

import kvboost
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.record import code, record


def test_a_record_says_what_when_where_and_which_code() -> None:
    goals = [Goal("fast", True, "2 ×")]
    made = record("x", {"model": "small"}, {"cpu": "y"}, {"rows": [1]}, goals, ["it leaks"])
    assert list(made)[:6] == ["benchmark", "date", "version", "commit", "model", "machine"]
    assert made["date"].endswith("+00:00") and made["rows"] == [1] and made["model"] == "small"
    assert made["goals"] == [{"text": "fast", "met": True, "figure": "2 ×"}]
    assert made["problems"] == ["it leaks"]
    assert made["settings"] == {}  # the model and the machine say the rest
    json.dumps(made)


def test_the_commit_is_that_of_the_checkout() -> None:
    folder = Path(kvboost.__file__).parent
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    commit = code()["commit"]
    if done.returncode:
        assert commit is None
    else:
        assert commit is not None and commit.rstrip("+") == done.stdout.strip()
