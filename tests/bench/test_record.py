from __future__ import annotations

import json
import subprocess
from pathlib import Path

import kvboost
from kvboost.bench.record import code, here, record


def test_a_record_says_what_when_where_and_which_code() -> None:
    made = record("x", "small", {"cpu": "y"}, rows=[1])
    assert list(made)[:6] == ["benchmark", "date", "version", "commit", "model", "machine"]
    assert made["date"].endswith("+00:00") and made["rows"] == [1]
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


def test_this_machine_has_a_name() -> None:
    machine = here()
    assert machine["cpu"] and machine["cores"] >= 1 and "dtype" not in machine
